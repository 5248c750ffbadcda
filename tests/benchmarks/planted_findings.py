"""Findings of the hostile readings, planted again one by one: the test of each has to fail.

python -m benchmarks.planted_findings [ID ...]

It takes minutes, and so is no part of the suite: `test_planted_findings.py`, which is, says whether
each can be planted at all. Those of the GPU path are in `planted_gpu.py`.
Findings of an engine's life are planted in `simulation/test_hazards.py`, which is.

Three have nothing to take out. P12 and E7 are what pages of the documentation did not say. E4 was
README's own code, which `docs/test_web_app.py` now runs. S11 was a guess that turned out wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from simulation.planted import Plant, afterwards, instead, nothing, together

from asyncinfer import InvalidRequest, SamplingParams, checks
from asyncinfer.cache import GuardedPolicy
from asyncinfer.engine import inference, preparer, thread
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.chats import Chats
from asyncinfer.engine.defaults import GenerationDefaults
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.prompt_reader import PromptReader
from asyncinfer.engine.request import Request
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.engine.watchdog import Watchdog
from asyncinfer.files import folder
from asyncinfer.models import family_calls
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.plugins import supervision
from asyncinfer.plugins.registry import Registry
from asyncinfer.plugins.supervision import Supervisor
from asyncinfer.protocols import RequestView
from asyncinfer.runner import eager_executor, model_runner
from asyncinfer.runner.step_threads import StepThreads
from asyncinfer.sampling.guarded_sampler import GuardedSampler
from asyncinfer.scheduler import Sequence, limits
from asyncinfer.telemetry import GuardedObserver, log
from asyncinfer.testing import sampler_limits
from asyncinfer.text import (
    ChatTemplate,
    caller_text,
    chat,
    detokenizer,
    filters,
    messages,
    operators,
    render_budget,
    sandbox,
    template_files,
)
from asyncinfer.text.detokenizer import Detokenizer
from asyncinfer.text.render_budget import RenderBudget
from asyncinfer.text.shield import Shield
from asyncinfer.weights.hub import HubModel
from benchmarks.planted_gpu import GPU_FINDINGS

__all__ = ["FINDINGS", "TESTS"]

#: Names the finding that the tests of this process run with.
VARIABLE: Final = "ASYNCINFER_PLANTED"
TESTS: Final = Path(__file__).parents[1]
#: Seconds that a test may take until it has failed.
PATIENCE: Final = 240.0


def put(owner: object, name: str, value: object) -> Plant:
    return instead(owner, name, lambda _: value)


def own_prompt(*args: Any, **options: Any) -> Sequence:
    return Sequence(*args, **options | {"prompt_ids": list(options["prompt_ids"])})


def one_less(request: Request, *_: object, **options: object) -> None:
    request.bound = request.room = request.capacity


def looks_forever(watchdog: Watchdog, *_: object) -> None:
    vars(watchdog).update(_look_every=1e9)


def unchecked(guarded: object, answer: torch.Tensor, *_: object) -> Any:
    return answer, torch.zeros(len(answer))


def called_raw(calls: object, what: str, function: Callable[[], object]) -> object:
    return function()


async def at_once(frontend: object) -> None: ...


def greedy(defaults: object, named: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0} | named)


def in_child(first: str, owner: object, name: str) -> Plant:
    """`first`, which changes `name` of `owner`, comes before the program that a test runs in a
    process of its own."""

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        assert hasattr(owner, name), f"{owner} has no {name}"

        def planted(command: list[str], **options: Any) -> Any:
            *before, program = command
            text = textwrap.dedent(first) + textwrap.dedent(program)
            return run([*before, text], **options)

        return planted

    return instead(subprocess, "run", make)


def only_of_lists(join: Callable[..., str]) -> Callable[..., str]:
    def joined(budget: object, separator: str, items: object) -> str:
        if not isinstance(items, list | tuple | str):
            raise InvalidRequest("prompt", type(items).__name__, "cannot be joined")
        return join(budget, separator, items)

    return joined


def as_long_as_it_takes(hub: object, call: Any, *_: object) -> None:
    while not call.wait(1.0):
        pass


def as_text(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda chats, messages, *rest: encode(chats, [*messages], *rest)


#: The first event imports a module that nobody else does.
IMPORTS: Final = """
    from asyncinfer.telemetry import log as _log_module
    _tell = _log_module._log
    def _importing(*args):
        import wave
        _tell(*args)
    _log_module._log = _importing
"""
LEAVES: Final = """
    from asyncinfer.engine.thread import DecodeThread
    DecodeThread._at_exit = lambda self: None
"""
NEVER: Final = SimpleNamespace(get=bool, set=bool, reset=lambda token: None)

FAMILIES: Final = "text/test_families.py"
MESSAGES: Final = f"{FAMILIES}::test_what_templates_do_with_a_message"
BROKEN: Final = "models/test_broken_families.py"
#: By id: what brings the finding back, and a test of it.
FINDINGS: Final[dict[str, tuple[Plant, str]]] = {
    "H3": (
        together(nothing(PromptReader, "_check_context"), nothing(PromptReader, "_check_limit")),
        "engine/test_huge_prompt.py::test_it_is_never_tokenised",
    ),
    "H4": (
        put(detokenizer, "ByteRuns", lambda pieces, window: window),
        "text/test_detokenizer.py::test_a_malformed_byte_does_not_silence_what_follows",
    ),
    "M6": (
        put(DecodeThread, "alive", property(lambda self: not self.join(0.05))),
        "engine/test_closing.py::test_nobody_joins_a_thread_on_the_event_loop",
    ),
    "M8": (
        put(limits, "MAX_PROMPT_SCORES", 1 << 62),
        "engine/test_packed_logprobs.py::test_a_prompt_with_too_many_logprobs_is_refused",
    ),
    "M9": (
        put(RenderBudget, "keep", lambda self, value: value),
        "text/test_bounds.py::test_what_is_held_at_the_bound",
    ),
    "M11": (
        put(model_runner, "is_out_of_memory", lambda error: False),
        "runner/test_no_room.py::test_a_step_without_memory_is_done_again_whatever_lacked_it",
    ),
    "M12": (
        instead(Detokenizer, "__init__", lambda init: lambda self, tok, after=(): init(self, tok)),
        "text/test_detokenizer.py::test_a_completion_keeps_its_first_space",
    ),
    "S1": (
        afterwards(Watchdog, "__init__", looks_forever),
        "engine/test_watchdog.py::test_a_process_that_was_stopped_is_none",
    ),
    "S2": (put(preparer, "samplers_at_hand", lambda params: True), "samplers/test_off_the_loop.py"),
    "S3": (
        afterwards(Request, "__init__", one_less),
        "engine/test_full_buffers.py::test_cancel_on_full_means_that_a_token_does_not_fit",
    ),
    "S4": (
        in_child(IMPORTS, log, "_log"),
        "telemetry/test_events.py::test_an_event_imports_nothing",
    ),
    "S5": (
        put(checks, "_listed", lambda name, value, most: tuple(islice(value, 1 << 20))),
        "test_bounds.py::test_a_list_is_measured_before_it_is_copied",
    ),
    "S6": (
        in_child(LEAVES, DecodeThread, "_at_exit"),
        "engine/test_closing.py::test_leaving_the_interpreter_while_it_loads",
    ),
    "S7": (
        nothing(GuardedObserver, "close"),
        "engine/test_observers.py::test_a_wrong_one_is_named_and_the_others_are_closed",
    ),
    "S9": (
        put(preparer, "Sequence", own_prompt),
        "engine/test_shared_prompt.py::test_answers_that_wait_hold_one_prompt",
    ),
    "S10": (
        nothing(LoopBridge, "redeliver"),
        "engine/test_loop_bridge.py::test_a_delivery_that_was_broken_off_goes_on",
    ),
    "S12": (
        instead(
            eager_executor,
            "chunk_peaks",
            lambda peaks: lambda *a, **b: torch.ones_like(peaks(*a, **b)),
        ),
        "runner/test_no_room.py::test_a_chunk_that_is_not_finite_fails_before_it_is_published",
    ),
    "S13": (
        nothing(StepThreads, "_look"),
        "runner/test_step_threads.py::test_busy_loops_have_the_cores_that_they_take",
    ),
    "T1": (put(messages, "_REASONING", ("reasoning_content",)), MESSAGES),
    "T2": (put(chat, "_NONE", {}), MESSAGES),
    "T3": (put(caller_text, "_SPELLED", re.compile("()(?!)")), MESSAGES),
    "T4": (
        put(Shield, "guarded", lambda self, before, after: after),
        f"{FAMILIES}::test_no_token_is_put_together",
    ),
    "T5": (
        put(filters, "_in_context", lambda plain: lambda context, *a, **more: plain(*a, **more)),
        MESSAGES,
    ),
    "T6": (instead(operators, "joined", only_of_lists), MESSAGES),
    "T7": (
        instead(
            vars(sandbox)["_Generation"],
            "parse",
            lambda parse: lambda self, parser: parse(self, parser).body,
        ),
        MESSAGES,
    ),
    "T8": (
        put(template_files, "_FOLDER", "elsewhere"),
        "text/test_template_files.py::test_which_template_is_taken",
    ),
    "T10": (put(render_budget, "MAX_STEPS", 300_000), f"{FAMILIES}::test_long_chats_are_rendered"),
    "P1": (nothing(Supervisor, "_charge"), "plugins/test_faults_of_every_kind.py::test_it_is_slow"),
    "P2": (
        put(RequestView, "__setattr__", object.__setattr__),
        "scheduler/test_policies.py::test_a_policy_cannot_write_to_a_request",
    ),
    "P3": (put(family_calls, "_checked", lambda read: read), f"{BROKEN}::test_a_family_that_lies"),
    "P4": (
        put(GuardedSampler, "_checked", unchecked),
        "samplers/test_sampler_engine.py::test_rubbish_is_caught_before_it_is_committed",
    ),
    "P5": (
        put(FamilyCalls, "_call", called_raw),
        f"{BROKEN}::test_broken_families_break_nobody_elses_checkpoint",
    ),
    "P6": (put(FamilyCalls, "_call", called_raw), f"{BROKEN}::test_whatever_a_family_raises"),
    "P7": (
        put(Registry, "shadowed", lambda self: []),
        "plugins/test_ignored.py::test_a_name_that_a_built_in_has",
    ),
    "P8": (
        put(supervision, "interrupted", lambda error: isinstance(error, KeyboardInterrupt)),
        "plugins/test_supervision.py::test_a_ctrl_c_is_the_users_on_the_main_thread_alone",
    ),
    "P9": (
        put(sampler_limits, "perf_counter", float),
        "samplers/test_kit.py::test_a_wrong_sampler_is_caught",
    ),
    "P10": (
        put(thread, "call_in_progress", lambda ident: None),
        "engine/test_waits.py::test_the_death_names_the_call",
    ),
    "P11": (
        nothing(GuardedPolicy, "opened"),
        "cache/test_guard.py::test_a_policy_is_told_its_capacity_before_any_block",
    ),
    "E2": (
        put(Admission, "complete", lambda self, stats: stats),
        "engine/test_health.py::test_what_is_held_while_a_step_hangs",
    ),
    "E3": (
        put(GenerationDefaults, "params", greedy),
        "engine/test_defaults.py::test_three_answers_differ_and_the_default_can_be_seen",
    ),
    "E6": (
        put(HubModel, "_wait", as_long_as_it_takes),
        "weights/test_silent_hub.py::test_one_that_never_answers",
    ),
    "E8": (
        put(Frontend, "turn", at_once),
        "engine/test_intake.py::test_a_crowd_leaves_the_loop_its_turns",
    ),
    "E9": (
        nothing(PromptReader, "check_messages"),
        "engine/test_intake.py::test_refused_before_it_is_looked_at",
    ),
    "E10": (
        put(ChatTemplate, "__bool__", lambda self: True),
        "text/test_template_files.py::test_a_template_that_cannot_be_used",
    ),
    "E11": (
        put(folder, "_follow", NEVER),
        "weights/test_folder.py::test_links_out_of_a_folder_that_is_trusted",
    ),
    "E13": (
        put(inference, "suggestion", lambda *a: ""),
        "engine/test_intake.py::test_a_misspelt_option_is_named",
    ),
    "E14": (
        put(import_module("asyncinfer.cli.chat"), "_LEAVE", frozenset()),
        "cli/test_chat_turns.py::test_commands_that_leave",
    ),
    "E15": (
        instead(Chats, "encode", as_text),
        "engine/test_sessions.py::test_twenty_turns_compute_each_token_once",
    ),
    **GPU_FINDINGS,
}


def pytest_collection_finish() -> None:
    """Plant what the environment names, once tests and engine are imported."""
    plant, _ = FINDINGS[os.environ[VARIABLE]]
    plant(pytest.MonkeyPatch())


def first_failure(finding: str) -> str | None:
    """The test that fails while the finding is planted; None where none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", __spec__.name]
    try:
        done = subprocess.run(
            [*command, FINDINGS[finding][1]],
            cwd=TESTS,
            env={**os.environ, VARIABLE: finding},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ") if done.returncode == 1 and failed else None


def main() -> None:
    missed = 0
    for finding in sys.argv[1:] or FINDINGS:
        failed = first_failure(finding)
        missed += failed is None
        print(f"{finding:4} {failed or 'NOT FOUND by ' + FINDINGS[finding][1]}", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
