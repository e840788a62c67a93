"""``lazyviz.calibrate()``: measures ops on this machine's CPU, and stores the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..plan.result_tables import Table, Tabular
from ..plan.runtime.cpu_calibration import measure
from ..plan.runtime.cpu_op_times import CpuRates, cache_file
from ..record.tape import tape
from ..view.export.atomic_write import write_whole


@dataclass(frozen=True)
class Calibration(Tabular):
    """The measured rates of the CPU, and the ``file`` that stores them; ``None`` if it cannot be written."""

    rates: CpuRates
    file: Path | None

    def __repr__(self) -> str:
        return f"<Calibration of the CPU: {self.rates.matmul[-1][1] / 1e9:,.0f} GFLOP/s>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        """The rate of the largest measured ops of each kind; for memory, of memory that no cache has."""
        rates = self.rates
        products = {"matrix products": rates.matmul, "3x3 convolutions": rates.convolution}
        moved = {
            "elementwise": rates.elementwise,
            "functions (tanh)": rates.function,
            "transposed copies": rates.copy,
            "softmax": rates.softmax,
            "layer norm": rates.norm,
        }
        rows = [(f"{curve[-1][1] / 1e9:,.1f} GFLOP/s", name) for name, curve in products.items()]
        rows += [(f"{curve[-1][1] / 1e9:,.1f} GB/s", name) for name, curve in moved.items()]
        rows.append((f"{rates.call * 1e6:.2f} µs", "per call"))
        rows.append((f"{rates.issue * 1e6:.2f} µs", "per op of a training step"))
        where = f", stored in {self.file}" if self.file is not None else ", which could not be stored"
        return Table(f"Calibration of the CPU{where}", ("large", "ops"), rows)


def calibrate() -> Calibration:
    """Measure a few ops of several sizes on the CPU, in under two seconds.

    Afterwards, plans for ``"cpu"`` have projected times, and reports show them next to measured times, in
    this and later processes.  The results are stored in the user's cache directory
    (``$XDG_CACHE_HOME/lazyviz``) for this machine, the number of threads, and the PyTorch version.  Call it
    when the machine is idle, and again after changes.

    Raises ``RuntimeError`` inside a lazy block, where ops are recorded instead of run.
    """
    if tape.recording.graph is not None:
        raise RuntimeError(
            "calibrate() measures ops, which a lazy block would record instead: call it outside the block."
        )
    rates, file = measure(), cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, rates.text().encode())
    except OSError:
        return Calibration(rates, None)
    return Calibration(rates, file)
