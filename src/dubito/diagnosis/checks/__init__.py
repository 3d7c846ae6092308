"""The checks of `dubito.audit`, one kind of fault a file."""
