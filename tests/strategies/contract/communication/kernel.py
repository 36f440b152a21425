"""What the kernel says that this process has written, sockets included."""

from pathlib import Path


def written_bytes() -> int:
    """Bytes given to ``write`` and its kin by all threads of this process since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])
