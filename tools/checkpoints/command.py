"""The verb `checkpoint`: verify, inspect, list, export and import checkpoints without a run.

No rank is started, and torch is imported only where needed: inspecting a checkpoint takes tenths of a second.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from trainwright.command.arguments import Parser
from trainwright.core.errors import CheckpointError
from trainwright.core.problems import ConfigError, did_you_mean
from trainwright.core.text.printable import printable
from trainwright.tools.verb import FAILED, OK, run_verb

FORMATS = ("safetensors", "hf", "peft", "lightning", "torch")
DTYPES = ("float32", "bfloat16", "float16", "float64")
_SUFFIX = {"safetensors": "-safetensors", "hf": "-hf", "peft": "-peft", "lightning": ".ckpt", "torch": ".pt"}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

HELP = """trainwright checkpoint: inspect, verify and convert checkpoints. No process is started.

usage: trainwright checkpoint <verb> PATH [options]

verbs:
  verify PATH     read every byte and compare checksums; one line per damaged file, naming the file and
                  the rank that wrote it. Exit code 0: good, 1: damaged
  inspect PATH    step, layout, versions, metrics, sizes per rank, and the tensors
      --all         every tensor, not the first 40
      --json        everything as one JSON document
  list FOLDER     the checkpoints of a folder, of a run directory or of all runs in runs/<name>, newest first
      --deep        read every byte of each, not only sizes
      --json        as one JSON document
  export PATH     write the weights (or, for lightning, all of the state) for other tools
      --format      safetensors, hf (a folder for transformers' from_pretrained), peft (the adapter alone, for
                    PeftModel.from_pretrained), lightning (a .ckpt) or torch ({name: tensor})
      --merge       hf: merge the adapter into the weights
      --to DEST     default: named after the checkpoint, in the current directory
      --max-shard-size SIZE   of a safetensors file, like 500MB (default 5GB in a folder)
      --dtype       float32, bfloat16, float16 or float64; default: as stored
      --model       hf, peft: the attribute with the model to export, if the module has several
      --tokenizer FOLDER      hf, peft: copy the tokenizer's files; default: tokenizer/ of the checkpoint's run
      --overwrite   replace an earlier export at DEST
  import SOURCE   make a checkpoint for ckpt_path= and init_from= from safetensors, a Hugging Face folder, a
                  Lightning .ckpt, a torch file of weights or a DeepSpeed folder
      --to DEST     the new checkpoint
      --trust       let SOURCE run code if it is a pickle that needs to; only for files you trust
      --overwrite   replace the checkpoint at DEST

examples:
  trainwright checkpoint list runs/gpt
  trainwright checkpoint verify runs/gpt/2026-01-31_14-05-09/checkpoints/step=2000
  trainwright checkpoint export runs/gpt/2026-01-31_14-05-09/checkpoints/step=2000 --format hf --to my_model
  trainwright checkpoint import pytorch_model.bin --to imported && trainwright fit recipe=mine init_from=imported
"""


def run_checkpoint_command(words: Sequence[str]) -> int:
    """Run a verb of `checkpoint` and print errors to stderr.

    Args:
        words: the command line after `trainwright`, `checkpoint` included.

    Returns:
        The exit code: 0 success, 1 the checkpoint is damaged, 2 the command line or the path was refused.
    """
    return run_verb("checkpoint", words, HELP, _run)


def _run(words: Sequence[str]) -> int:
    verb = words[0]
    if verb not in _VERBS:
        what = "option before the verb" if verb.startswith("-") else "such verb of checkpoint"
        raise ConfigError([f"{verb}: there is no {what}; {did_you_mean(verb, _VERBS, 'verbs')}"])
    parser = Parser("checkpoint")
    run, options = _VERBS[verb]
    for name, about in options.items():
        parser.add_argument(name, **about)
    return run(parser.parse_args(list(words[1:])))


def size_in_bytes(text: str) -> int:
    """Parse a size: 500MB, 5GB, 2GiB, 1000000.

    Raises:
        argparse.ArgumentTypeError: if it is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    size = int(float(match[1]) * _UNITS.get(match[2].lower(), 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size; type for example 500MB, 5GB or 2GiB")
    return size


def _verify(arguments: argparse.Namespace) -> int:
    from trainwright.tools.checkpoints.report import verified

    problems, text = verified(arguments.path)
    print(printable("\n".join(problems) if problems else text))
    return FAILED if problems else OK


def _inspect(arguments: argparse.Namespace) -> int:
    from trainwright.tools.checkpoints.report import Inspection

    found = Inspection.of(arguments.path)
    if arguments.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        print(printable(found.to_text(every_tensor=arguments.all)), end="")
    return OK


def _list(arguments: argparse.Namespace) -> int:
    from trainwright.tools.checkpoints.report import listed, table_of

    rows = listed(arguments.path, deep=arguments.deep)
    print(json.dumps([row.to_dict() for row in rows], allow_nan=False) if arguments.json else printable(table_of(rows)))
    return OK


def _export(arguments: argparse.Namespace) -> int:
    name = PurePosixPath(arguments.path.rstrip("/")).name or "checkpoint"
    to = arguments.to or name.removesuffix(".ckpt") + _SUFFIX[arguments.format]
    _log(f"reading {arguments.path}")
    from trainwright.checkpoint.foreign.export import export
    from trainwright.checkpoint.foreign.tokenizer_files import TOKENIZER_FILES

    written = export(
        arguments.path,
        to,
        arguments.format,
        max_shard_bytes=arguments.max_shard_size,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        model=arguments.model,
        merge=arguments.merge,
        tokenizer=arguments.tokenizer,
    )
    if arguments.format in ("hf", "peft") and not any((written / name).exists() for name in TOKENIZER_FILES):
        _log("exported without a tokenizer, since the run has none; type --tokenizer FOLDER to copy one")
    _log("done")
    print(written)
    return OK


def _import(arguments: argparse.Namespace) -> int:
    _log(f"reading {arguments.source}")
    from trainwright.checkpoint.foreign.importing import import_checkpoint

    try:
        written = import_checkpoint(
            arguments.source, arguments.to, trust=arguments.trust, overwrite=arguments.overwrite
        )
    except CheckpointError as error:
        if "trust=true" not in str(error):
            raise
        raise CheckpointError(str(error).replace("trust=true", "--trust")) from error
    _log("done")
    print(written)
    return OK


def _log(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)


_FLAG: dict[str, Any] = {"action": "store_true"}
_PATH: dict[str, Any] = {"path": {"metavar": "PATH"}}
# Verb -> function and argparse arguments.
_VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], dict[str, dict[str, Any]]]] = {
    "verify": (_verify, _PATH),
    "inspect": (_inspect, {**_PATH, "--all": _FLAG, "--json": _FLAG}),
    "list": (_list, {"path": {"metavar": "FOLDER"}, "--deep": _FLAG, "--json": _FLAG}),
    "export": (
        _export,
        {
            **_PATH,
            "--format": {"choices": FORMATS, "required": True},
            "--to": {},
            "--max-shard-size": {"type": size_in_bytes},
            "--dtype": {"choices": DTYPES},
            "--model": {},
            "--merge": _FLAG,
            "--tokenizer": {},
            "--overwrite": _FLAG,
        },
    ),
    "import": (
        _import,
        {"source": {"metavar": "SOURCE"}, "--to": {"required": True}, "--trust": _FLAG, "--overwrite": _FLAG},
    ),
}
