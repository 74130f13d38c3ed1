"""How many steps an epoch of the data at hand has. Rows are counted, and not read: a prediction needs none."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlexp.base.errors import UserError
from rlexp.base.file_hashes import files_of
from rlexp.config.schema import Config
from rlexp.config.schema.data import ArithmeticDataConfig, RowsDataConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import held_out_of, sources_of, weights_of
from rlexp.training.dataset.row_files import parts_of, rows_in

MOST = 1 << 30  # bytes of files that are counted: some seconds


def rows_at_hand(cfg: Config) -> int | None:
    """Return the rows to train on; None where they are on the hub, are not there, or are too many to be counted."""
    data = cfg.data
    if isinstance(data, SyntheticDataConfig | ArithmeticDataConfig):
        return data.size
    assert isinstance(data, RowsDataConfig)
    sources = sources_of(data)
    if weights_of(sources) is not None:
        return None
    try:
        files = [files_of(each.cfg.path) for each in sources]
        if not all(files) or sum(path.stat().st_size for paths in files for path in paths) > MOST:
            return None
        rows = sum(_rows_of(path) for paths in files for path in paths)
    except (UserError, OSError, pa.ArrowException):  # the run itself says what is wrong with them
        return None
    rows -= held_out_of(data.eval_size, rows)
    return max(0, rows if data.max_samples is None else min(rows, data.max_samples))


def _rows_of(path: Path) -> int:
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return int(pq.read_metadata(path).num_rows)
    return sum(map(rows_in, parts_of(path)))


def steps_of_epoch(cfg: Config, rows: int) -> int:
    batch = cfg.rollout.batch_size if cfg.loss.draws else cfg.train.batch_size
    batches = rows // batch if cfg.data.drop_last else -(-rows // batch)
    return batches * cfg.rollout.epochs * cfg.rollout.minibatches if cfg.loss.draws else batches
