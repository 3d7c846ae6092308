"""Named columns, one row per image: `Table`, its provenance, and views of several tables."""

from dubito.table.columns import ensembles_in, recorded_settings, settings_difference, writer_of
from dubito.table.provenance import Provenance
from dubito.table.table import Column, Exact, Rows, Table, check_table, to_tensor
from dubito.table.views import concat, ensemble

__all__ = [
    "Column",
    "Exact",
    "Provenance",
    "Rows",
    "Table",
    "check_table",
    "concat",
    "ensemble",
    "ensembles_in",
    "recorded_settings",
    "settings_difference",
    "to_tensor",
    "writer_of",
]
