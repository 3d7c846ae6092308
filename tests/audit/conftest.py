"""What several tests of the audit compare with."""

import pytest

from dubito.audit.audit import Audit
from tests.audit.colours import Colours, look, pictures


@pytest.fixture(scope="module")
def healthy() -> Audit:
    return look(Colours(), against=pictures(50, seed=1)[0])
