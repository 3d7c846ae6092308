"""Named columns, one row per image: `Table`, and views of several tables."""

from dubito.table.provenance import Provenance
from dubito.table.table import (
    ENSEMBLES,
    WRITERS,
    Column,
    Exact,
    Rows,
    Table,
    asked_otherwise,
    check_table,
    ensembles_in,
    gradients_in,
    to_tensor,
    writer_of,
)

__all__ = [
    "ENSEMBLES",
    "WRITERS",
    "Column",
    "Exact",
    "Provenance",
    "Rows",
    "Table",
    "asked_otherwise",
    "check_table",
    "ensembles_in",
    "gradients_in",
    "to_tensor",
    "writer_of",
]
