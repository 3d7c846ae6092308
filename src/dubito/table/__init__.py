"""Named columns, one row per image: `Table`, its provenance, and views of several tables."""

from dubito.table.columns import ColumnFamily, declare, ensembles_in, recorded_settings, settings_difference, writer_of
from dubito.table.logit_form import Form, check_size_of_logits, form_of, warn_of_probabilities
from dubito.table.provenance import Provenance
from dubito.table.table import Column, Exact, Rows, Table, check_table, to_tensor
from dubito.table.views import chosen_rows, concat, ensemble

__all__ = [
    "Column",
    "ColumnFamily",
    "Exact",
    "Form",
    "Provenance",
    "Rows",
    "Table",
    "check_size_of_logits",
    "check_table",
    "chosen_rows",
    "concat",
    "declare",
    "ensemble",
    "ensembles_in",
    "form_of",
    "recorded_settings",
    "settings_difference",
    "to_tensor",
    "warn_of_probabilities",
    "writer_of",
]
