"""The papers' evaluations: transfer, human ambiguity, corruption curve, ID against OOD, benchmark data sets."""
