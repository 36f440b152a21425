from trainwright.core.errors import CheckpointError
from trainwright.core.failures.error_text import user_frames


def test_error_that_is_its_own_cause() -> None:
    error = CheckpointError("full")
    error.__cause__ = error
    assert user_frames(error) == []
