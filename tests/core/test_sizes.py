import pytest

from trainwright.core.text.sizes import size_text


@pytest.mark.parametrize(
    ("count", "digits", "text"),
    [
        (0, 1, "0 B"), (1023, 2, "1023 B"), (1536, 1, "1.5 KiB"), (1536, 2, "1.50 KiB"), (3 * 2**30, 2, "3.00 GiB"),
        (2**50, 2, "1024.00 TiB"), (2.5, 1, "2 B"), (-2048, 1, "-2.0 KiB"),
    ],
)  # fmt: skip
def test_size_text(count: float, digits: int, text: str) -> None:
    assert size_text(count, digits) == text
