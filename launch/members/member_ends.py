"""What it means that members of a generation ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, ends, first_failure
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.members.generations import Generations
from trainwright.launch.members.mailbox import Left, records_of
from trainwright.launch.outcome.ending import told_to_end
from trainwright.launch.ranks.supervisor import Ended
from trainwright.launch.recovery.restarts import Setback, setback_of


class MemberEnds:
    """Reads the ends of members, and what they wrote down before.

    Args:
        cfg: the resolved configuration of the attempt.
        records: the folder for what the members write down.
        generations: knows which member is which rank.
    """

    def __init__(self, cfg: DictConfig, records: Path, generations: Generations) -> None:
        self._cfg = cfg
        self._records = records
        self._generations = generations

    def told(self, ended: Iterable[Ended]) -> Interrupted | None:
        """The signal that these were told to end by, if they were."""
        return told_to_end(self._cfg, {each.rank: each.exit_code for each in ended})

    def of_members(self, ended: Iterable[Ended]) -> list[Ended]:
        """Those of them that took part in this generation."""
        return [each for each in ended if each.rank in self._generations.now.members]

    def failed(self, ended: Iterable[Ended]) -> list[Ended]:
        """Those that ended badly, and not because they were told to."""
        return [each for each in ended if each.failed and self.told([each]) is None]

    def blame(self, failed: Sequence[Ended]) -> RankError:
        """The error of the first that failed; of one that was to join, if no other did."""
        now, run_dir = self._generations.now, Path(self._cfg.run_dir)
        by_rank = {now.members.index(each.rank): each for each in self.of_members(failed)}
        if not by_rank:
            exit_codes = {each.rank: each.exit_code for each in failed}
            return first_failure(records_of(self._records, None), exit_codes, run_dir)
        codes = {rank: by_rank[rank].exit_code if rank in by_rank else None for rank in range(len(now.members))}
        hangs = {rank: each.hang for rank, each in by_rank.items() if each.hang is not None}
        return first_failure(self._generations.folder, codes, run_dir, hangs)

    def setback(self, error: RankError, failed: Sequence[Ended]) -> Setback:
        """What the policy must know of an error, by which these failed."""
        ranks, steps = {self._generations.now.rank_of(each.rank) for each in failed}, self._generations.steps
        step = max((step for rank, step in steps.items() if rank in ranks), default=None)
        return setback_of(error, step, self._generations.begun)

    def broken(self, left: Left) -> tuple[RankError, Setback]:
        """The error, and what the policy must know, of a member that lost its connections to others that live."""
        rank = self._generations.now.rank_of(left.member) or 0
        error = RankError(f"the connections of rank {rank} broke: {left.error}", rank, None)
        step = max(self._generations.steps.values(), default=None)
        return error, Setback(rank, "broken connections", step=step, begun=self._generations.begun)

    def lines(self, members: Collection[int], exit_codes: dict[int, int]) -> list[str]:
        """How those of them ended that were not told to, in a line each."""
        gone = {rank: member for rank, member in enumerate(self._generations.now.members) if member in members}
        codes = {rank: exit_codes[member] for rank, member in gone.items() if member in exit_codes}
        return ends(self._generations.folder, codes)
