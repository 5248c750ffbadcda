"""`TorchDefaults`: the settings of torch that belong to the whole process or thread."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["TorchDefaults"]


class TorchDefaults(NamedTuple):
    """What a plugin could change under everybody else's feet."""

    dtype: torch.dtype
    threads: int
    device: torch.device

    @classmethod
    def now(cls, device: torch.device | None = None) -> TorchDefaults:
        """Of this thread. To ask for the device takes ten times as long as the others: it may be
        given by who knows it."""
        known = torch.get_default_device() if device is None else device
        return cls(torch.get_default_dtype(), torch.get_num_threads(), known)

    def restore(self) -> str | None:
        """Set back what differs; says what did, None if nothing."""
        changed = TorchDefaults.now()
        if changed == self:
            return None
        torch.set_default_dtype(self.dtype)
        if changed.device != self.device:
            # Without a default of its own a thread uses the CPU, and tensors are made faster.
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_num_threads(self.threads)
        return ", ".join(
            f"{name} {now} instead of {before}"
            for name, before, now in zip(self._fields, self, changed, strict=True)
            if now != before
        )
