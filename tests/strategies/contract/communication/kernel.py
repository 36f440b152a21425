"""Bytes written by this process according to the kernel, sockets included."""

from pathlib import Path


def written_bytes() -> int:
    """Return the bytes passed to ``write`` and similar calls by all threads of this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])
