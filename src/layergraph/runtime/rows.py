"""How long each row of a cache is, and which of the tokens it was given are real."""

from __future__ import annotations

import torch


class Rows:
    """Lengths of rows, on the CPU: nothing here waits for a device.

    Attributes:
        length: tokens written in each row, padding included.
        counts: int64 [rows], real ones.
        highest: int64 [rows], the largest that ``counts`` ever was: what slots have been written over.
    """

    def __init__(self, n_rows: int = 0) -> None:
        self.length = 0
        self.counts = torch.zeros(n_rows, dtype=torch.int64)
        self.highest = torch.zeros(n_rows, dtype=torch.int64)
        self._real = torch.zeros(0, n_rows, dtype=torch.bool)

    def __len__(self) -> int:
        return self.counts.shape[0]

    @property
    def longest(self) -> int:
        return int(self.counts.max()) if len(self) else 0

    @property
    def real(self) -> torch.Tensor:
        """bool [rows, length]: False for padding."""
        return self._real[: self.length].t()

    def after(self, real: torch.Tensor) -> torch.Tensor:
        """Counts once ``real`` (bool [rows, tokens]) is written; before the first call all rows are empty."""
        new = real.sum(1)
        return self.counts + new if len(self) else new

    def has_gap(self, real: torch.Tensor) -> bool:
        """Whether padding would stand behind a real token."""
        started = real.cumsum(1) > 0
        if len(self):
            started = started | (self.counts > 0)[:, None]
        return bool((started & ~real).any())

    def append(self, real: torch.Tensor) -> None:
        needed = self.length + real.shape[1]
        if needed > self._real.shape[0]:
            grown = torch.zeros(max(needed, 2 * self._real.shape[0], 64), len(self), dtype=torch.bool)
            grown[: self.length] = self._real[: self.length]
            self._real = grown
        self._real[self.length : needed] = real.t()
        self.length = needed
        self.counts = self.after(real)
        self.highest = torch.maximum(self.highest, self.counts)

    def before_last(self, count: int) -> torch.Tensor:
        """Counts without the last ``count`` tokens, padding among them."""
        return self.counts - self._real[self.length - count : self.length].sum(0)

    def drop_last(self, count: int) -> None:
        self.counts = self.before_last(count)
        self.highest = torch.where(self.counts > 0, self.highest, 0)
        self.length -= count

    def select(self, indices: torch.Tensor) -> None:
        self.counts, self.highest = self.counts[indices], self.highest[indices]
        self._real = self._real[:, indices]

    def clear(self) -> None:
        self.length = 0
        self.counts.zero_()
        self.highest.zero_()


__all__ = ["Rows"]
