"""Choosing and checking the checkpoint to resume from, in the launching process: without torch or reading tensors."""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, verify
from trainwright.checkpoint.format.records import OBJECTS, objects_problem
from trainwright.checkpoint.read.candidates import AUTO, BEST, INITIAL, LAST, RUN_STATE, best_of, newest_good
from trainwright.checkpoint.store.paths import is_remote, local_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.checkpoint.store.write_errors import free_bytes
from trainwright.core.errors import CheckpointError
from trainwright.core.run.run_directory import CHECKPOINTS, RUNS, runs_of
from trainwright.core.text.sizes import size_text

_SAFETENSORS = ".safetensors"
# File types of torch; only these can be read over http.
_TORCH_FILES = (".ckpt", ".pt", ".pth", ".bin")


def decide_resume(cfg: DictConfig, verb: str) -> list[str]:
    """Resolve `ckpt_path` and `resume` in the configuration.

    `ckpt_path` becomes the path of the newest checkpoint with a good manifest, and `resume_folders` the folders in
    which the ranks look for it, or for an older one if its contents are damaged. What is evaluated without a word is
    the best checkpoint of the newest run, or its newest if it monitored nothing.

    Args:
        cfg: the configuration; changed in place.
        verb: fit, validate, test or predict.

    Returns:
        Contradictory options, and checkpoints that were not found.
    """
    problems = list(_contradictions(cfg, verb))
    is_open = verb != "fit" and cfg.ckpt_path is None and cfg.init_from is None
    if cfg.ckpt_path == BEST or (is_open and cfg.resume is None):
        problems += _find_best(cfg, verb)
    elif cfg.ckpt_path == LAST or (cfg.resume == AUTO and cfg.ckpt_path is None):
        problems += _find_newest(cfg, verb)
    elif cfg.ckpt_path == INITIAL:
        cfg.ckpt_path, cfg.resume_folders = None, []
    else:
        cfg.resume_folders = []
        if cfg.ckpt_path is not None and not is_remote(cfg.ckpt_path):
            cfg.ckpt_path = str(Path(cfg.ckpt_path.removeprefix("file://")).expanduser())
    return problems


def resume_in_place(cfg: DictConfig, verb: str) -> DictConfig:
    """Return the configuration of the next attempt of a run, resuming from its newest good checkpoint.

    Args:
        cfg: the resolved configuration of the first attempt; not changed.
        verb: fit, validate, test or predict; only fit saves checkpoints to resume from.

    Returns:
        A copy. Without a checkpoint of its own the run starts as before: from `ckpt_path` or `init_from`, if set.
    """
    cfg = cfg.copy()
    if verb != "fit":
        return cfg
    folders = _folders(cfg)
    newest, _ = newest_good(folders)
    if newest is not None:
        # It includes what was loaded at first, and is a run state, which needs trust for objects alone.
        cfg.ckpt_path, cfg.resume, cfg.resume_folders = newest, AUTO, folders
        cfg.init_from, cfg.trust = None, cfg.trust and OBJECTS in read_manifest(newest).about
    return cfg


def saved_global_batch(cfg: DictConfig) -> int | None:
    """Return the samples per optimizer step recorded in the newest good checkpoint of this run; None if unknown.

    Args:
        cfg: the resolved configuration of a started run.
    """
    newest, _ = newest_good(_folders(cfg))
    return None if newest is None else recorded_global_batch(newest)


def recorded_global_batch(path: str) -> int | None:
    """Return the samples per optimizer step recorded in a run state; None if unknown, or if there is no such folder.

    Raises:
        CheckpointError, OSError: if it cannot be read.
    """
    samples = read_manifest(path).about.get("global_batch_size") if Folder(path).exists() else None
    return None if samples is None else int(samples)


def resume_problems(cfg: DictConfig, verb: str) -> list[str]:
    """Return the problems of `ckpt_path` and `init_from`.

    Args:
        cfg: the resolved configuration, after `decide_resume`.
        verb: fit, validate, test or predict.
    """
    problems = []
    if cfg.ckpt_path is not None:
        try:
            problems += _problems_of_checkpoint(cfg, verb)
        except (CheckpointError, OSError) as error:
            problems.append(f"ckpt_path={cfg.ckpt_path}: {error}")
    if cfg.init_from is not None:
        problems += _problems_of_weights(cfg)
    return problems


def _contradictions(cfg: DictConfig, verb: str) -> Iterator[str]:
    given = [f"{key}={cfg[key]}" for key in ("ckpt_path", "resume") if cfg[key] is not None]
    if cfg.resume not in (None, AUTO):
        yield f"resume={cfg.resume}: unknown; type resume=auto, or resume=null for off"
    elif cfg.resume is not None and cfg.ckpt_path is not None:
        yield f"{' with '.join(given)}: both select a checkpoint; leave one out"
    elif cfg.resume is not None and verb != "fit":
        yield f"resume={cfg.resume} with {verb}: only fit can start from scratch; type ckpt_path={LAST}"
    if cfg.init_from is not None and cfg.ckpt_path is not None:
        yield f"init_from={cfg.init_from} with ckpt_path={cfg.ckpt_path}: both set the weights; leave one out"
    if cfg.ckpt_path == INITIAL and verb == "fit":
        yield f"ckpt_path={INITIAL} with fit: without a checkpoint, fit starts from initial weights; leave it out"
    if cfg.trust and not given:
        yield "trust=true without a checkpoint: it lets the file named by ckpt_path run code; leave it out"
    if not cfg.strict and not given and cfg.init_from is None:
        yield "strict=false without anything to load: it applies to ckpt_path and init_from; leave it out"
    if cfg.resume_folders:
        yield "resume_folders is decided by the command; type ckpt_path=last or resume=auto, and run_dir=..."


def _find_best(cfg: DictConfig, verb: str) -> list[str]:
    """Find the best checkpoint of the newest run that monitored a value; without a word, of the newest run."""
    is_open = cfg.ckpt_path is None
    for folder in _folders(cfg, verb):
        best = best_of(folder)
        if best is not None:
            cfg.ckpt_path, cfg.resume_folders = best, []
            return []
        if is_open and newest_good([folder], for_fit=False)[0] is not None:
            break
    if is_open:
        cfg.ckpt_path = LAST
        return [each.replace(f"ckpt_path={LAST}", f"{verb} without a checkpoint") for each in _find_newest(cfg, verb)]
    cfg.ckpt_path = None
    return [
        f"ckpt_path={BEST}: no run of {run_name(cfg)} has a checkpoint with a monitored value; train with "
        f"checkpoint={BEST} (or checkpoint.{BEST}.monitor=<logged value>), or type ckpt_path={LAST}"
    ]


def _find_newest(cfg: DictConfig, verb: str) -> list[str]:
    is_last = cfg.ckpt_path == LAST
    folders = _folders(cfg, verb)
    cfg.ckpt_path, reasons = newest_good(folders, for_fit=verb == "fit")
    cfg.resume_folders = folders if cfg.ckpt_path is not None or reasons else []
    if cfg.ckpt_path is not None or not is_last:
        return []
    if reasons:
        why = f"there is no good checkpoint; skipped: {'; '.join(reasons)}"
    elif cfg.run_dir is not None:
        why = f"there is no checkpoint in {', '.join(folders)}"
    else:
        why = f"no run of {run_name(cfg)} under {RUNS / run_name(cfg)}/ has a checkpoint"
    fresh = f"resume={AUTO} to start from scratch without one"
    if verb != "fit":
        fresh = f"init_from=<weights>, or ckpt_path={INITIAL} to take the initial weights of the module"
    return [f"ckpt_path={LAST}: {why}; type ckpt_path=<path>, or {fresh}"]


def _folders(cfg: DictConfig, verb: str = "fit") -> list[str]:
    """Return the folders to search: those of the configuration, then those of `run_dir` or of all runs of the name.

    Evaluation writes its results into `run_dir`, and searches all runs.
    """
    given = cfg.run_dir is not None
    runs = [Path(cfg.run_dir)] if given else []
    runs += runs_of(run_name(cfg)) if not given or verb != "fit" else []
    folders = [*_dirpaths(cfg, of_every_run=not given), *(str(run / CHECKPOINTS) for run in runs)]
    return list(dict.fromkeys(folders))


def _dirpaths(cfg: DictConfig, *, of_every_run: bool) -> Iterator[str]:
    """Yield `dirpath` of the checkpoint callbacks; for every run: only those independent of the run directory."""
    raw: Any = OmegaConf.to_container(cfg.checkpoint, resolve=False)
    for name, callback in raw.items():
        dirpath = callback.get("dirpath") if isinstance(callback, dict) else None
        if dirpath is not None and not (of_every_run and "${" in str(dirpath)):
            with contextlib.suppress(OmegaConfBaseException):  # `validate` reports missing values
                yield str(cfg.checkpoint[name].dirpath)


def run_name(cfg: DictConfig) -> str:
    """Return the name of the run, "unnamed" if it is not set."""
    return "unnamed" if OmegaConf.is_missing(cfg, "name") else str(cfg.name)


# ---- the checkpoint at a path ---------------------------------------------------------------------------------------


def _problems_of_checkpoint(cfg: DictConfig, verb: str) -> list[str]:
    path = str(cfg.ckpt_path)
    if path.startswith(("http://", "https://")):
        if path.lower().endswith(_TORCH_FILES):
            problem = _connection_problem(path)  # its reader checks whether the file exists
            return [] if problem is None else [f"ckpt_path={path}: {problem}; fetch the file, then type its path"]
        allowed = f"only {', '.join(_TORCH_FILES)} files can be read over http"
        return [f"ckpt_path={path}: {allowed}; fetch the folder, then type its path"]
    if is_remote(path):
        if Folder(path).is_file():
            return []
    else:
        problem = _problem_of_local(cfg, Path(path))
        if problem is not None:
            return [f"ckpt_path={path}: {problem}"]
        if not Folder(path).has(MANIFEST):
            return []  # a file of torch, or a folder that the strategy reads because it is trusted
    return _problems_of_run_state(cfg, verb, read_manifest(path))


def _problem_of_local(cfg: DictConfig, path: Path) -> str | None:
    """Return why a local path is not a checkpoint to resume from; None if it is."""
    unreadable = _unreadable(path)
    if unreadable is not None:
        return f"{unreadable}; {_advice(cfg)}"
    if path.is_dir():
        return None if (path / MANIFEST).exists() else _problem_of_folder(cfg, path)
    if (path.parent / MANIFEST).exists():
        return f"is one file of a checkpoint; type its folder, ckpt_path={path.parent}"
    return _only("weights", str(path)) if path.suffix == _SAFETENSORS else None


def _only(kind: str, path: str) -> str:
    return f"contains only {kind}, so training cannot be resumed; type init_from={path} to start from them"


def _unreadable(path: Path) -> str | None:
    if not os.path.lexists(path):
        return "there is no such file or folder; type another path, or leave this key out"
    if not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return "cannot be read by this user; change its permissions (chmod -R u+rX), or type another path"
    return None


def _problem_of_folder(cfg: DictConfig, path: Path) -> str | None:
    """Return what a folder without a manifest is instead; None if it can be read."""
    inside, _ = newest_good([str(path), str(path / CHECKPOINTS)])
    if inside is not None:
        return f"contains checkpoints, but is not one; type ckpt_path={inside}, the newest good one in it"
    if (path / "latest").is_file() or list(path.glob("*_model_states.pt")):
        return f"is a DeepSpeed checkpoint; {_import_command(path)}, then ckpt_path=imported"
    if (path / ".metadata").exists():
        of_torch = "is of torch.distributed.checkpoint, whose .metadata is a pickle and can run code"
        return None if cfg.trust else f"{of_torch}; type trust=true if you trust its source"
    if list(path.glob(f"*{_SAFETENSORS}")) and not list(path.glob("rank_*")):
        return _only("weights", str(path))
    return f"has no {MANIFEST}, so it is not a checkpoint, or an unfinished one; {_advice(cfg)}"


def _import_command(path: Path | str) -> str:
    return f"type trainwright checkpoint import {path} --to imported"


def _advice(cfg: DictConfig) -> str:
    # The run directory is decided by now, whether it was given or not.
    everywhere = [*_folders(cfg), *(str(run / CHECKPOINTS) for run in runs_of(run_name(cfg)))]
    newest, _ = newest_good(everywhere)
    return f"the newest of {cfg.name}: ckpt_path={newest}" if newest else f"{cfg.name} has none under runs/ yet"


# ---- a run state and the configuration ------------------------------------------------------------------------------


def _problems_of_run_state(cfg: DictConfig, verb: str, manifest: Manifest) -> list[str]:
    about, problems = manifest.about, []
    wrong = verify(cfg.ckpt_path, manifest, deep=False)
    if wrong:
        problems.append(f"ckpt_path={cfg.ckpt_path}: is damaged: {'; '.join(wrong)}; {_advice(cfg)}")
    if verb == "fit" and about.get("kind", RUN_STATE) != RUN_STATE:
        problems.append(f"ckpt_path={cfg.ckpt_path}: {_only(about['kind'], cfg.ckpt_path)}")
    if OBJECTS in about and not cfg.trust:
        problems.append(f"ckpt_path={cfg.ckpt_path}: {objects_problem(about)}")
    if cfg.trust and OBJECTS not in about:
        problems.append(f"trust=true has no effect: nothing in {cfg.ckpt_path} can run code; leave it out")
    if verb == "fit":
        problems += [*_batch_problems(cfg, about), *_space_problems(cfg, about)]
    return problems


def _batch_problems(cfg: DictConfig, about: Any) -> Iterator[str]:
    saved, given = about.get("global_batch_size"), cfg.global_batch_size
    if None not in (saved, given) and saved != given and not cfg.trainer.get("allow_changed_data"):
        trained = f"global_batch_size={given}, but {cfg.ckpt_path} was trained with {saved}"
        yield f"{trained}; type global_batch_size={saved}, or trainer.allow_changed_data=true"


def _space_problems(cfg: DictConfig, about: Any) -> Iterator[str]:
    """Yield folders without space for the next checkpoint, which is as large and replaces this one only at its end."""
    needed = about.get("bytes")
    if not needed:
        return
    for name, callback in cfg.checkpoint.items():
        if not isinstance(callback, DictConfig) or callback.get("save_weights_only") or not callback.get("dirpath"):
            continue
        free = free_bytes(callback.dirpath)
        if free is not None and free < needed:
            key = f"checkpoint.{name}.dirpath"
            there = f"{size_text(free)} are free, but a checkpoint of this run needs {size_text(needed)}"
            yield f"{key}={callback.dirpath}: {there}; free space, or type another {key}=..."


# ---- weights to start from ------------------------------------------------------------------------------------------


def _problems_of_weights(cfg: DictConfig) -> list[str]:
    path = str(cfg.init_from)
    if path.startswith(("http://", "https://")):
        return [f"init_from={path}: weights are not read over http; fetch them, then type their path"]
    if is_remote(path):
        return []
    local = Path(local_path(path))
    unreadable = _unreadable(local)
    if unreadable is not None:
        return [f"init_from={path}: {unreadable}"]
    is_folder = local.is_dir() and ((local / MANIFEST).exists() or any(local.glob(f"*{_SAFETENSORS}")))
    if is_folder or (local.is_file() and local.suffix == _SAFETENSORS):
        return []
    problem = "is neither a .safetensors file, a folder of them, nor a checkpoint"
    return [f"init_from={path}: {problem}; {_import_command(path)}, then init_from=imported"]


# To connect to a server, name look-up included.
_SECONDS = 4.0
_PORTS = {"http": 80, "https": 443}


def _connection_problem(url: str) -> str | None:
    """Return why no connection to the server of `url` can be made; None if one was."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # A name look-up takes no deadline; its thread ends with the process.
    threading.Thread(target=lambda: answers.put(_try(url)), daemon=True).start()
    try:
        return answers.get(timeout=_SECONDS)
    except queue.Empty:
        return f"{urlsplit(url).netloc} has not responded within {_SECONDS:g} s"


def _try(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        with socket.create_connection(address, _SECONDS):
            return None
    except (OSError, ValueError) as error:  # UnicodeError of a name is a ValueError
        return f"cannot connect to {urlsplit(url).netloc} ({error})"
