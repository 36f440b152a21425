"""Messages of other libraries that concern their developers, each by its logger or category and its exact text."""

from __future__ import annotations

import logging
import re
import warnings

_LOGGED = {
    # transformers imports torchao wherever it is installed; its wheels contain kernels of several GPUs and Pythons.
    "torchao": r"Failed to load \S+/torchao/_C_\S+\.so: Could not load this library: ",
    "torch.utils._pytree": r"<enum '(KernelPreference|ScaleCalculationMode)'> is an Enum subclass and is now natively ",
    "lightning.pytorch.utilities.rank_zero": r"💡 Tip: For seamless cloud (logging|uploads) and ",
}
# Lightning's own use of a name of torch.
_WARNED = r"`isinstance\(treespec, LeafSpec\)` is deprecated, use "


def drop_library_messages() -> None:
    """Drop them from now on, in this process and its forks; all else that these libraries say is kept."""
    for logger, text in _LOGGED.items():
        logging.getLogger(logger).addFilter(_Other(text))
    warnings.filterwarnings("ignore", message=_WARNED, module=r"lightning\.pytorch\.utilities\._pytree$")


class _Other(logging.Filter):
    """Passes all records but those that begin with a text."""

    def filter(self, record: logging.LogRecord) -> bool:
        return re.match(self.name, record.getMessage()) is None
