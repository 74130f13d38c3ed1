"""The only door to the `datasets` library: folders and data sets of the hub, as a table of rows."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlexp.base.errors import DataError
from rlexp.base.file_hashes import contents, contents_of, files_in
from rlexp.training.dataset.row_files import MOST_ROWS, PartOf, rows_of, together

PATIENCE = 10.0  # seconds for the hub's first answer
SAVED = ("state.json", "dataset_dict.json")  # in a folder that `save_to_disk` wrote


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set, in the order that it has there."""

    names: tuple[str]
    rows: Any  # datasets.Dataset

    @property
    def size(self) -> int:
        return int(self.rows.data.nbytes)

    @property
    def version(self) -> str | None:
        """The commit of the hub that its files come from, if they come from there."""
        names = getattr(self.rows.info, "download_checksums", None) or {}
        commits = {match[1] for match in (re.search(r"@([0-9a-f]{40})/", name) for name in names) if match}
        return min(commits) if len(commits) == 1 else None

    def contents(self) -> list[str]:
        """Hash the table's files; rows that stand in none are hashed themselves."""
        files = [contents(Path(each["filename"])) for each in self.rows.cache_files]
        whole = files and self.rows._indices is None and self.rows.data.num_rows == len(self.rows)
        return [*(files if whole else [_hashed(self.rows)]), self.names[0].partition("[")[2], str(len(self.rows))]

    def parts(self) -> Iterator[PartOf]:
        batches = self.rows.with_format("arrow").iter(MOST_ROWS)
        total, size = max(1, len(self.rows)), self.size
        for part in together((row for batch in batches for row in rows_of(batch)), lambda read: size * read // total):
            yield 0, part


def _hashed(rows: Any) -> str:
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(MOST_ROWS):
        digest.update(repr(batch.to_pylist()).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def table(
    key: str, path: str, subset: str | None, split: str, revision: str | None, streaming: bool, most: int | None
) -> HubSplit:
    """Open a folder or a data set of the hub. Of a streamed one, only so many rows are fetched."""
    import datasets

    datasets.disable_progress_bars()
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and says so when a process fails
    folder = Path(path).expanduser()
    name = str(folder) if folder.is_dir() else path
    at = f"{key}.path={path}"
    own = None
    if folder.is_dir():  # a cache that goes by what stands in its files: the library's own goes by their times
        own = str(Path(datasets.config.HF_DATASETS_CACHE) / "rlexp" / contents_of(files_in(folder)))
    else:
        _go_without_hub_if_unreachable(datasets)
    load = functools.partial(datasets.load_dataset, name, subset, revision=revision)
    try:
        if any((folder / each).is_file() for each in SAVED):
            rows = _saved(datasets, folder, split, key)
        elif streaming:
            rows = _materialised(datasets, load, key, split, own, most)
        else:
            rows = load(split=split, cache_dir=own)
    except DataError:
        raise
    except Exception as error:  # the library raises what its readers and its network raise
        raise DataError(_explained(key, at, name, subset, split, error)) from None
    return HubSplit((f"{path}[{split}]",), rows)


def _go_without_hub_if_unreachable(datasets: Any) -> None:
    """Ask once whether the hub answers. If not, only what was fetched before is taken, without try after try."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)  # with the library's own proxies and certificates
    except Exception:  # whatever its client raises
        sys.stderr.write("rlexp: the hub does not answer: what was fetched from it before is taken.\n")
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _saved(datasets: Any, folder: Path, split: str, key: str) -> Any:
    """Read what `save_to_disk` wrote: one split, or several by their names."""
    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        loaded = {str(loaded.split or "train"): loaded}
    name = split.partition("[")[0]
    if name not in loaded:
        raise DataError(f"{key}.split={split}: {folder} has no such split. It has {', '.join(loaded)}.")
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(loaded[name])})
    whole = (part.from_ or 0, part.to if part.to is not None else len(loaded[name]))
    return loaded[name] if whole == (0, len(loaded[name])) else loaded[name].select(range(*whole))


def _materialised(datasets: Any, load: Any, key: str, split: str, own: str | None, first: int | None) -> Any:
    """Take a streamed set whole, since the order of all rows must be known; `train[:1000]` takes its first rows."""
    part = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if part is None:
        raise DataError(f"{key}.split={split}: a streamed set is read from its beginning. Give NAME or 'NAME[:100]'.")
    base, most = part.groups()
    stream = load(split=base, streaming=True)
    if counts := [int(each) for each in (most, first) if each is not None]:
        stream = stream.take(min(counts))
    return datasets.Dataset.from_generator(lambda: iter(stream), features=stream.features, cache_dir=own)


def _explained(key: str, at: str, name: str, subset: str | None, split: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    if subset is None and "Config name is missing" in reason:
        return f"{key}.subset: {name} has several subsets. Name one: {key}.subset=NAME ({reason})."
    if "split" in reason and isinstance(error, ValueError):
        return f"{key}.split={split}: {name} has no such split ({reason}). Name one that it has: {key}.split=NAME."
    if "Couldn't reach" in reason:
        return (
            f"{at}: is no file or folder, was not fetched from the hub before, and the hub cannot be reached. Give a "
            f"file of rows or a folder; relative paths start at {Path.cwd()}."
        )
    return (
        f"{at}: cannot be read as a data set ({type(error).__name__}: {reason}). Give a file of rows, a folder, or a "
        f"hub name; relative paths start at {Path.cwd()}."
    )
