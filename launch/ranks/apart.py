"""A function in a process of its own, whose answer comes back: nothing of what it does is left in this one."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from trainwright.core.problems import ConfigError
from trainwright.launch.ranks.forkserver import become_ordinary, hidden_main, start_forkserver


def call_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process that the fork server makes.

    Args:
        function: at the top level of a module.
        *arguments: that can be pickled, as what it returns.

    Raises:
        ConfigError: that the function raised; or with its last words, if it failed otherwise.
    """
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    try:
        with hidden_main():
            process.start()
        theirs.close()
        is_good, answer = ours.recv()
    except EOFError:
        process.join()
        raise ConfigError([f"{function.__name__} ended without an answer (exit code {process.exitcode})"]) from None
    finally:
        ours.close()
        if process.is_alive():
            process.join(1.0)
            process.kill()
            process.join()
    if not is_good:
        raise ConfigError(answer)
    return answer


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    become_ordinary()
    try:
        answer = True, function(*arguments)
    except ConfigError as error:
        answer = False, list(error.problems)
    except Exception as error:
        traceback.print_exc()
        answer = False, [f"{function.__name__} failed: {type(error).__name__}: {error}"]
    connection.send(answer)
    connection.close()
