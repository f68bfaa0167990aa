"""The trials of a search in a file that several processes share; each trial is worked on by one of them.

Optuna keeps the trials in a journal, one line per change. Whoever works on a trial holds the lock of a file of that
trial, and a lock ends with its process, however that ends: a running trial whose lock is free was left behind, and any
process goes on with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DwindleError
from ..files import check_folder, lock, unlock, write_errors
from ..io.draws import mix
from ..train.state import differing

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, tuple[float, float]]
JOURNAL = "study.jsonl"


class SharedStudy:
    """The study of a search in `folder`, new or begun earlier, by any number of processes."""

    def __init__(self, folder: Path, space: Space, start: Mapping[str, Any], seed: int, patience: float) -> None:
        """start: the settings of the first trial, by name; where one of them is outside its range, the first is drawn
        like the others. patience: seconds between two checks whether other processes have finished.
        """
        self.folder, self.space, self.seed, self.patience = folder, space, seed, patience
        inside = all(isinstance(v := start.get(k), float | int) and space[k][0] <= v <= space[k][1] for k in space)
        self.start = {key: float(start[key]) for key in space} if inside else None
        check_folder(folder)
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self.study = self._opened(folder / JOURNAL)

    @staticmethod
    def _opened(path: Path) -> optuna.Study:
        import optuna
        from optuna.storages import journal

        # Optuna's other lock, a link, stays for ever if the path is relative and the process that made it was killed.
        writing = journal.JournalFileOpenLock(str(path))
        try:
            writing.acquire()
            try:
                _drop_torn_line(path)
            finally:
                writing.release()
            backend = journal.JournalFileBackend(str(path), writing)
            return optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="dwindle",
                direction="maximize",
                load_if_exists=True,
            )
        except Exception as error:  # an error of json, the system or Optuna, depending on the fault in the file
            raise DwindleError(f"{path} cannot be read ({type(error).__name__}); choose another --out.") from error

    def agree(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Refuse a study that was begun with other settings. Those that did not exist then have their defaults."""
        with self._alone():
            old = self.study.user_attrs.get("given")
            if old is None:
                self.study.set_user_attr("given", json.loads(json.dumps(given)))
            elif others := differing({**defaults, **old}, dict(given)):
                raise DwindleError(f"{self.folder} holds a search with other settings: {others}; choose another --out.")

    @contextmanager
    def next_trial(self, count: int) -> Iterator[optuna.trial.FrozenTrial | None]:
        """A trial that no other process works on: one that was left behind, else a new one if there are fewer than
        `count`. None: `count` trials are finished, by this process or others, which are waited for.
        """
        while (taken := self._take(count)) is None and sum(trial.state.is_finished() for trial in self.trials) < count:
            time.sleep(self.patience)
        if taken is None:
            yield None
            return
        trial, file = taken
        try:
            yield trial
        finally:
            self._mark(trial.number).unlink(missing_ok=True)
            unlock(file)

    def finish(self, trial: optuna.trial.FrozenTrial, value: float | None, about: Mapping[str, Any]) -> None:
        """Write what a trial gave. value: None if its loss diverged."""
        from optuna.trial import TrialState

        with self._alone(), write_errors(self.folder / JOURNAL):
            for name, what in about.items():
                self.study._storage.set_trial_user_attr(trial._trial_id, name, what)
            self.study.tell(trial.number, value, state=TrialState.FAIL if value is None else None)

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.trials

    def _mark(self, number: int) -> Path:
        return self.folder / f".trial-{number:04d}.made"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Only one process at a time reads the study and changes it."""
        path = self.folder / ".study.made"
        while (file := lock(path)) is None:
            if not self.folder.exists():
                raise DwindleError(f"{self.folder} was removed while the search was at work; start it again.")
            time.sleep(0.02)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            unlock(file)

    def _take(self, count: int) -> tuple[optuna.trial.FrozenTrial, int] | None:
        """A trial for this process and the descriptor of its lock. None: there is none, now or at all."""
        with self._alone(), write_errors(self.folder / JOURNAL):
            known = self.trials
            if sum(trial.state.is_finished() for trial in known) >= count:
                return None
            for trial in known:
                if not trial.state.is_finished() and (file := lock(self._mark(trial.number))) is not None:
                    return trial, file
            if len(known) >= count or (file := lock(self._mark(len(known)))) is None:
                return None
            try:
                self._add(known)
                return self.trials[-1], file
            except BaseException:
                unlock(file)
                raise

    def _add(self, known: list[optuna.trial.FrozenTrial]) -> None:
        """Add a running trial with all its settings, in one line of the journal: no kill leaves half of them."""
        from optuna.distributions import FloatDistribution
        from optuna.trial import TrialState, create_trial

        drawn = self.start if self.start and not known else self._drawn(known)
        ranges: Any = {key: FloatDistribution(*both, log=_log(both)) for key, both in self.space.items()}
        about = {"settings": [f"{key}={drawn[key]:.3g}" for key in self.space]}
        self.study.add_trial(
            create_trial(state=TrialState.RUNNING, params=drawn, distributions=ranges, user_attrs=about)
        )

    def _drawn(self, known: list[optuna.trial.FrozenTrial]) -> dict[str, float]:
        """The settings of the next trial: a function of the seed, its number and the trials so far, with the values of
        those finished. As long as fewer than ten have a value, TPE draws at random, whatever they are.
        """
        import optuna

        sampler = optuna.samplers.TPESampler(seed=mix(self.seed, len(known)))
        view = optuna.create_study(study_name=f"trial {len(known)}", direction="maximize", sampler=sampler)
        view.add_trials(known)
        trial = view.ask()
        return {key: trial.suggest_float(key, *self.space[key], log=_log(self.space[key])) for key in self.space}


def _log(both: tuple[float, float]) -> bool:
    """Whether a range is drawn from log-uniformly."""
    return both[0] > 0


def _drop_torn_line(path: Path) -> None:
    """Remove the end of a line that a full disk or a power failure left in the journal; Optuna would append to it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        text = file.read()
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
