"""The server's process: settings in, a server until it is told to stop, an exit code out."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from engine.device_faults import DeviceUnavailable
from engine.settings import EngineSettings
from engine.worker import LoadPolicy
from policy_server.descriptors import AcceptErrors
from policy_server.logs import configure_logging, log_event
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings, SettingsError, parse_settings

if TYPE_CHECKING:
    from engine.policy import Policy

log = logging.getLogger("policy_server")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2

# A supervisor may signal the process and then its group, which are one order, not two.
ECHO_SECONDS = 0.5


def main() -> int:
    """Serve as the command line says; the exit code: 0 after an orderly stop, 2 for bad settings, 1 for all else."""
    try:
        settings = parse_settings(sys.argv[1:])
    except SettingsError as error:
        print(f"policy_server: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    configure_logging(level=settings.log_level, as_json=settings.log_json)
    return asyncio.run(run(settings, lambda report: load(settings.engine, report)))


async def run(settings: ServerSettings, load_policy: LoadPolicy) -> int:
    """Serve until SIGINT, SIGTERM or the engine's death; the exit code."""
    told_to_stop = _on_signals()
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    server = PolicyServer(settings, load_policy)
    try:
        await server.start()
    except SettingsError as error:
        log.error("cannot start: %s", error)
        return EXIT_BAD_SETTINGS
    ready, ended = asyncio.ensure_future(server.ready()), asyncio.ensure_future(server.engine_ended())
    await asyncio.wait((told_to_stop, ended, ready), return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and ready.exception() is None:
        freeze_gc()
        is_trained = bool(ready.result()["trained"])
        log_event(log, logging.INFO, _ready_line(settings.engine.checkpoint, is_trained), url=server.url)
        await asyncio.wait((told_to_stop, ended), return_when=asyncio.FIRST_COMPLETED)
    elif ready.done():
        await asyncio.wait((ended,))  # a failed load ends the engine, but the news of it may come a moment later
    drained = await server.stop()
    died_of = None  # or what it died of, perhaps in a call that was accepted before the order to stop
    if server.engine.finished.done():
        await asyncio.wait((ended,))
        died_of = ended.exception()
    code = EXIT_OK if drained else EXIT_FAILED
    if isinstance(died_of, SettingsError):
        code = EXIT_BAD_SETTINGS
        log.error("cannot start: %s", died_of)
    elif isinstance(died_of, DeviceUnavailable):
        code = EXIT_FAILED
        log.error("cannot start now: %s", died_of)
    elif died_of is not None:
        code = EXIT_FAILED
        fields = {"reason": f"{type(died_of).__name__}: {died_of}"}
        log.error("the engine died", exc_info=died_of, extra={"fields": fields})
    unfreeze_gc()
    if not server.engine.join(0):
        _exit_now(code)  # the thread is in a load or an abandoned call, which nothing can interrupt
    return code


def load(settings: EngineSettings, report: Callable[[str], None]) -> "Policy":
    """The policy of these settings.

    Raises SettingsError when they, or the checkpoint, cannot be used, DeviceUnavailable when the device cannot now.
    """
    report("importing torch")
    import torch

    from engine.startup import PolicyLoadError, load_policy

    # One core stays free for the event loop. On a CPU, torch's threads wait for each other by spinning: with as many
    # as there are cores, whatever else runs makes every operation wait, and calls become many times slower.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    try:
        return load_policy(settings, report)
    except PolicyLoadError as error:
        raise SettingsError(str(error)) from error


def _on_signals() -> asyncio.Future[None]:
    """Done at the first SIGINT or SIGTERM; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    told_to_stop: asyncio.Future[None] = loop.create_future()
    told_at = 0.0

    def on_signal(number: int) -> None:
        nonlocal told_at
        if not told_to_stop.done():
            log_event(log, logging.INFO, "told to stop", signal=signal.Signals(number).name)
            told_to_stop.set_result(None)
            told_at = loop.time()
        elif loop.time() > told_at + ECHO_SECONDS:
            log.warning("told to stop again: leaving at once")
            _exit_now(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return told_to_stop


def _ready_line(checkpoint: str, is_trained: bool) -> str:
    if not is_trained:
        return f'ready: "{checkpoint}" has synthetic weights, not trained ones, so its actions mean nothing'
    return f"ready: {checkpoint}"


def _exit_now(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


_FULL_EVERY = 1


def freeze_gc() -> None:
    """Have the collector leave alone what is loaded by now: some 400,000 objects, of libraries for the most part.

    Left to itself it looks at all of them in a full collection, which stops every thread for long, and so it waits
    until a hundred thousand more have come. Without them a full collection is short; it can come often, and what
    connections leave behind in cycles does not add up.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts anew what there is to look at
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_EVERY)


def unfreeze_gc() -> None:
    """Have the collector see everything again: at the interpreter's end libraries report as leaked what it does not."""
    gc.unfreeze()
