"""`TorchDefaults`: the settings of torch that belong to the whole process or thread."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["TorchDefaults"]


class TorchDefaults(NamedTuple):
    """Settings that a plugin could change for the whole process."""

    dtype: torch.dtype
    threads: int
    device: torch.device

    @classmethod
    def now(cls, device: torch.device | None = None) -> TorchDefaults:
        """This thread's settings. `device` is the default device if the caller knows it, since
        asking torch for it takes ten times as long as for the others."""
        known = torch.get_default_device() if device is None else device
        return cls(torch.get_default_dtype(), torch.get_num_threads(), known)

    def restore(self) -> str | None:
        """Put back the settings that changed; says which, None if none did."""
        changed = TorchDefaults.now()
        if changed == self:
            return None
        torch.set_default_dtype(self.dtype)
        if changed.device != self.device:
            # None means the CPU, and makes tensors faster than an explicit default does.
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_num_threads(self.threads)
        return ", ".join(
            f"{name} {now} instead of {before}"
            for name, before, now in zip(self._fields, self, changed, strict=True)
            if now != before
        )
