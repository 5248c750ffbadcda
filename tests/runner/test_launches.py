"""What recorded steps give a GPU to do, counted: kernels of our own as they would be launched,
and torch's operators that are more than a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from kernels.compiled import recorded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncinfer.attention import KVCache, PagedAttention
from asyncinfer.cache import KVGroupSpec
from asyncinfer.kernels import dispatch
from asyncinfer.models import Decoder, ModelConfig, decoder, tensor_table
from asyncinfer.quantization import CudaLinear, linear
from asyncinfer.runner.recorded_forward import RecordedForward
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import OPTION_WORDS, Draws, TokenHistory
from asyncinfer.sampling import recorded as recorded_sampler
from asyncinfer.scheduler import RunnerSpec

LAYERS, ROWS = 3, 128
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_context=4096,
)


#: Operators that are no views and launch nothing.
_NOTHING = ("empty", "new_empty", "_unsafe_view")


class Operators(TorchDispatchMode):
    """Counts what torch would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "aten" and not func.is_view and not name.startswith(_NOTHING):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A whole step and the layers of any, on tensors without values, as on a GPU."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setitem(linear._FORMATS, "plain", CudaLinear)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)
    monkeypatch.setattr(recorded_sampler, "fuses", lambda like: True)
    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda *_: True)
    table = tensor_table(CONFIG)
    with FakeTensorMode(), torch.inference_mode():
        made = Decoder(CONFIG, lambda name: torch.empty(table[name].shape, dtype=torch.bfloat16))
        spec = RunnerSpec(
            groups=(KVGroupSpec(64),),
            block_size=16,
            max_slots=ROWS,
            max_context=CONFIG.max_context,
            vocab_size=4000,
            max_step_tokens=512,
        )
        kv = KVCache.allocate(CONFIG, 64, 16, torch.bfloat16, "cpu")
        device = FakeDevice()
        state = SlotState(device, ROWS, 1, 256, ROWS, OPTION_WORDS)
        history = TokenHistory(ROWS + 1, torch.device("cpu"), capacity=CONFIG.max_context + 1)
        step = RecordedStep(made, [kv], spec, state, history, ROWS, 4)
        forward = RecordedForward(
            device, made, [kv], spec, state, history, rows=ROWS, tokens=spec.max_step_tokens
        )
        yield step, forward


@pytest.mark.parametrize(
    ("rows", "draws", "own", "torchs"),
    [
        # Inputs; six a layer; the head with its norm; two of the draw; where it goes. Torch has the
        # embedding and the angles.
        (1, Draws.GREEDY, 1 + 6 * LAYERS + 1 + 2 + 1, 2),
        (1, Draws.TEMPERATURE, 1 + 6 * LAYERS + 1 + 4 + 1, 2),
        (1, Draws.LOGITS, 1 + 6 * LAYERS + 1, 3),
        # Norms are launches of their own, ...
        (64, Draws.GREEDY, 1 + 8 * LAYERS + 2 + 2 + 1, 2),
        # ... and products torch's; then gates are, too, and what is added afterwards, but for the
        # residual that the next norm adds.
        (96, Draws.GREEDY, 1 + 5 * LAYERS + 1 + 2 + 1, 2 + 5 * LAYERS + 1),
    ],
)
def test_launches(steps: Any, rows: int, draws: Draws, own: int, torchs: int) -> None:
    step, _ = steps
    assert launched(lambda: step(rows, draws)) == (own, torchs)


@pytest.mark.parametrize(
    ("tokens", "own", "torchs"),
    [
        # One attention for rows that decode, and one for others. Torch looks up block tables,
        # tokens, embedding and angles, and keeps what comes out.
        (16, 9 * LAYERS, 5),
        (64, 9 * LAYERS, 5),
        (512, 6 * LAYERS, 5 + 5 * LAYERS),
    ],
)
def test_launches_of_prompts_beside_rows_that_decode(
    steps: Any, tokens: int, own: int, torchs: int
) -> None:
    _, forward = steps
    assert launched(lambda: forward(tokens, 32, False)) == (own, torchs)


def launched(step: Callable[[], None]) -> tuple[int, int]:
    """How many kernels of our own a step launches, and of torch's."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.inference_mode(),
        recorded() as launches,
        Operators() as operators,
    ):
        step()
    return len(launches), operators.names.total()
