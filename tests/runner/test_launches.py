"""What recorded steps give a GPU to do, counted: kernels of our own as they would be launched,
and torch's operators that are more than a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes.fake_device import FakeDevice
from kernels.compiled import recorded
from models.eagle3_heads import HeadedModel, random_head
from models.predictors import agreeing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncinfer.attention import DeviceBatch, KVCache, PagedAttention
from asyncinfer.cache import KVGroupSpec
from asyncinfer.config import EngineConfig
from asyncinfer.kernels import dispatch, ops
from asyncinfer.kernels.rehearsal import rehearsing
from asyncinfer.models import Decoder, ModelConfig, decoder, tensor_table
from asyncinfer.models.load import outline_model
from asyncinfer.params import SamplingParams
from asyncinfer.quantization import CudaLinear, linear
from asyncinfer.runner.caches import allocate_caches
from asyncinfer.runner.device import choose_kv
from asyncinfer.runner.memory import plan_memory
from asyncinfer.runner.recorded_forward import RecordedForward
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import (
    OPTION_WORDS,
    Draws,
    SamplingState,
    TokenHistory,
    token_masks,
    transfer,
)
from asyncinfer.sampling import recorded as recorded_sampler
from asyncinfer.scheduler import Join, RunnerSpec

LAYERS, ROWS = 3, 128
CUDA, META = torch.device("cuda", 0), torch.device("meta")
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
        made = func(*args, **(kwargs or {}))
        view = func.is_view and not copied(name, args[0], made)
        if space == "aten" and not view and not name.startswith(_NOTHING):
            self.names[name] += 1
        return made


def copied(name: str, tensor: torch.Tensor, made: Any) -> bool:
    """Whether an operator that gives a view where it can had to copy."""
    if name == "to":
        return (made.dtype, made.device) != (tensor.dtype, tensor.device)
    return name == "contiguous" and not tensor.is_contiguous()


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
        # Three answers to a prompt are rows like any others.
        (3, Draws.TEMPERATURE, 1 + 6 * LAYERS + 1 + 4 + 1, 2),
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
        # tokens (which it widens), embedding and angles, and keeps what comes out.
        (16, 9 * LAYERS, 6),
        (64, 9 * LAYERS, 6),
        (512, 6 * LAYERS, 6 + 5 * LAYERS),
    ],
)
def test_launches_of_prompts_beside_rows_that_decode(
    steps: Any, tokens: int, own: int, torchs: int
) -> None:
    _, forward = steps
    assert launched(lambda: forward(tokens, 32, False)) == (own, torchs)


@pytest.mark.parametrize(("rows", "others", "torchs"), [(8, 0, 5), (5, 3, 8)])
def test_launches_of_a_draw_by_a_grammar(
    monkeypatch: pytest.MonkeyPatch, rows: int, others: int, torchs: int
) -> None:
    """What comes after a step that ends with its logits. One copy brings all masks, and torch takes
    their bits apart. Where some rows have none, the others are copied out, and back."""
    packed = vars(transfer)["_packed"]
    monkeypatch.setattr(
        transfer, "_packed", lambda device, arrays, pin: packed(device, arrays, pin=False)
    )
    monkeypatch.setattr(token_masks, "fill_masks", lambda *_: np.zeros((rows, 125), np.int32))
    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda *_: True)
    count = rows + others
    sampling = SamplingState(count, 4000, TokenHistory(count, META, capacity=64), fused=True)
    for slot in range(count):
        join = Join(slot, [1], 1, [[0]], SamplingParams(temperature=0.0), slot)
        sampling.join(slot, replace(join, masked=slot < rows))
    slots = np.arange(count)
    sampling.masks.fill(range(rows), [1] * rows, [cast(Any, None)] * rows, [()] * rows)
    logits = torch.empty(count, 4000, device=META)
    positions = np.ones(count, np.int64)
    found = launched(lambda: sampling.sample(logits, slots, positions), fake=False)
    assert found == (2, torchs)


@pytest.mark.parametrize(
    ("made_by", "own", "torchs"),
    [
        # One product joins what three layers gave. Then two norms, a product, angles, KV, attention
        # and a product; a norm, a product, a gate and a product; a norm, the head and two of the
        # draw. Torch puts features and tokens together, and the logits of the few tokens that it
        # predicts among all.
        ("eagle", 16, 11),
        # Three norms and a product join token and state; the layer has experts beside a shared one,
        # of which torch's router gives the order.
        ("model", 21, 21),
    ],
)
def test_launches_of_what_predicts(
    gpu: None, tmp_path: Path, made_by: str, own: int, torchs: int
) -> None:
    """A token after each row that decodes, after a recorded pass."""
    given: dict[str, Any] = {"predictor": True}
    if made_by == "model":
        folder = agreeing().save(tmp_path)
    else:
        folder, head = HeadedModel(random_head(made_by)).save(tmp_path)
        given = {"head": head}
    with rehearsing(CUDA, lambda launch: None), torch.inference_mode():
        made = outline_model(folder, CUDA, torch.bfloat16, max_context=64, **given)
        config = EngineConfig(max_context=64, kv_bytes=1 << 30)
        vocab = made.config.vocab_size
        spec = plan_memory(config, made.config, made.dtype, CUDA, vocab)
        caches = [
            allocate_caches(made, each, spec, choose_kv(config.kv, CUDA)) for each in spec.groups
        ]
        kv = [cache for group in caches for cache in group if isinstance(cache, KVCache)]
        words = torch.empty(16, dtype=torch.int64, device=META)
        lengths, starts, zeros = (
            torch.empty(size, dtype=torch.int32, device=META) for size in (16, 17, 16 * 8)
        )
        shape = lengths[:, None], lengths, starts, words, spec.block_size, 16
        batch = DeviceBatch(*shape, arrivals=zeros)
        one = made.begin(words, kv, [batch] * len(kv))
        hidden = made.run(words, words, one)

        def predict() -> None:
            states = made.predict(words, words, hidden, one)
            ops.sample(made.predicted_logits(states)[:, :vocab])

        assert launched(predict, fake=False) == (own, torchs)


def launched(step: Callable[[], object], *, fake: bool = True) -> tuple[int, int]:
    """How many kernels of our own a step launches, and of torch's. Tensors on "meta" need not be
    `fake`."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext(),
        torch.inference_mode(),
        recorded() as launches,
        Operators() as operators,
    ):
        step()
    return len(launches), operators.names.total()
