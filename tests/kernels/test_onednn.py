"""oneDNN's products against float64, in every layout they are used with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncinfer.kernels import onednn

pytestmark = pytest.mark.skipif(
    not onednn.available(torch.float32), reason="torch without oneDNN's operators"
)


@pytest.mark.parametrize("rows", [1, 3, 16, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (7, 33), (1000, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_reordered(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    b = torch.randn(outputs) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = onednn.linear(x, onednn.reorder(weight), b)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_plain_and_transposed(rows: int) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(rows, 77), torch.randn(90, 32)
    got = onednn.linear(x, v[:77].t())
    torch.testing.assert_close(got.double(), x.double() @ v[:77].double(), rtol=1e-5, atol=1e-4)
    got = onednn.linear(x[:, :32].contiguous(), v)
    exact = x[:, :32].double() @ v.double().T
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


def test_unknown_dtypes_are_not_available() -> None:
    assert not onednn.available(torch.float64)
    assert not onednn.available(torch.float16)


@pytest.mark.parametrize(
    ("about", "home"),
    [("vendor_id\t: GenuineIntel\n", True), ("vendor_id\t: AuthenticAMD\n", False), (None, False)],
)
def test_mkl_is_fast_on_its_makers_processors(
    about: str | None, home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path, encoding: str) -> str:
        if about is None:
            raise FileNotFoundError(path)
        return about

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    # Not the answer that was found before.
    assert onednn.mkl_is_fast.__wrapped__() is home


@pytest.mark.parametrize(("seconds", "keeps_up"), [([1.4, 1.0], True), ([1.6, 1.0], False)])
def test_mkl_keeps_up_where_its_products_take_about_as_long(
    seconds: list[float], keeps_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_fast", lambda: False)
    monkeypatch.setattr(onednn, "available", lambda _: True)
    monkeypatch.setattr(onednn, "_least_seconds", lambda *_: seconds)
    assert onednn.mkl_keeps_up.__wrapped__() is keeps_up
