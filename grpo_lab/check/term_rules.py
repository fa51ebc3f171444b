"""S12: the term fences everything older."""

from __future__ import annotations

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    BucketReceived,
    EnginePaused,
    EngineResumed,
    MemberDied,
    MemberStarted,
    Record,
    RequestAdmitted,
    RequestRefused,
    TermBegan,
    UpdateStarted,
    VersionAnnounced,
    VersionCommitted,
    WeightsActivated,
    WeightsLoaded,
    WeightWriteBegan,
)

_OBEYED = (
    EnginePaused,
    EngineResumed,
    UpdateStarted,
    BucketReceived,
    WeightWriteBegan,
    WeightsLoaded,
    WeightsActivated,
)


class OlderTermsChangeNothing(Rule):
    """Once an engine has seen term t it obeys no older one; once term t began, no older one commits."""

    id = "S12"
    words = "messages of an older term change nothing"
    capability = "term_fencing"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._seen: dict[str, tuple[int, str]] = {}
        self._several: set[str] = set()  # engines that have seen more than one term
        self._began: tuple[int, str] = (0, "")
        self._terms = 0

    @on(*_OBEYED)
    def obeyed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, _OBEYED)
        if not isinstance(event, BucketReceived) or event.accepted:
            self._obey(event.engine, event.term, f"obeyed a message ({event.kind})", record)

    @on(RequestAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestAdmitted)
        self._obey(event.engine, event.request_term, f"admitted request {event.request}", record)

    @on(RequestRefused)
    def refused(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestRefused)
        if 0 < event.term < self._seen.get(event.engine, (0, ""))[0]:
            self.count()

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        self._terms += 1
        self._began = max(self._began, (event.term, record.id))

    @on(VersionCommitted, VersionAnnounced)
    def trainer_acted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (VersionCommitted, VersionAnnounced))
        if self._terms < 2:
            return
        self.count()
        if event.term < self._began[0]:
            what = "committed" if isinstance(event, VersionCommitted) else "announced"
            self.violate(
                f"{record.actor} {what} version {event.version} of term {event.term} although term "
                f"{self._began[0]} had begun",
                record,
                self._began[1],
            )

    @on(MemberDied, MemberStarted)
    def forgot(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._seen.pop(event.member, None)
        self._several.discard(event.member)

    def _obey(self, engine: str, term: int, what: str, record: Record) -> None:
        newest, proof = self._seen.get(engine, (0, ""))
        if term == newest or not term:
            if engine in self._several and term:
                self.count()
            return
        if newest:
            self._several.add(engine)
            if self.context.engine_can(engine, "term_fencing"):
                self.count()
                if term < newest:
                    self.violate(
                        f"{engine} {what} of term {term} although it had seen term {newest}", record, proof
                    )
        if term > newest:
            self._seen[engine] = (term, record.id)


TERM_RULES: tuple[type[Rule], ...] = (OlderTermsChangeNothing,)
