"""What Prometheus reads: counted where it happens, or asked of the engine at each scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.worker import WorkerStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One server's metrics, in a registry of its own.

    stats: the engine's state. gauges: name to (help, how to read the value) for what the server itself holds.
    """

    def __init__(self, stats: Callable[[], WorkerStats], gauges: dict[str, tuple[str, Callable[[], int]]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_AtScrape(stats, gauges))
        self._requests = Counter(
            "dreamzero_requests", "Requests by outcome.", ["kind", "outcome"], registry=self._registry
        )
        self._wait = Histogram(
            "dreamzero_queue_wait_seconds",
            "From a call's arrival to its start on the engine.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._inference = Histogram(
            "dreamzero_inference_seconds",
            "Time of a call on the engine, by phase; 'total' is all of it.",
            ["phase"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._received = Counter(
            "dreamzero_received_bytes", "Payload of messages from robots.", registry=self._registry
        )
        self._sent = Counter("dreamzero_sent_bytes", "Payload of messages to robots.", registry=self._registry)
        self._pending_cut = Counter(
            "dreamzero_pending_cut", "Pending connections cut off, there being too many.", registry=self._registry
        )

    def request(self, kind: str, outcome: str) -> None:
        """Count one answered (or abandoned) request. kind: "infer", "reset", or "unknown" for an unreadable one."""
        self._requests.labels(kind, outcome).inc()

    def call(self, seconds: Mapping[str, float]) -> None:
        """Note how long a call waited and ran, see EngineWorker.infer."""
        for phase, spent in seconds.items():
            if phase == "wait":
                self._wait.observe(spent)
            else:
                self._inference.labels("total" if phase == "infer" else phase).observe(spent)

    def received(self, payload: int) -> None:
        """Count a message's bytes."""
        self._received.inc(payload)

    def sent(self, payload: int) -> None:
        """Count a message's bytes."""
        self._sent.inc(payload)

    def pending_cut(self) -> None:
        """Count a connection that was cut off before it asked for anything."""
        self._pending_cut.inc()

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _AtScrape(Collector):
    def __init__(self, stats: Callable[[], WorkerStats], gauges: dict[str, tuple[str, Callable[[], int]]]) -> None:
        self._stats = stats
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        return []  # known only at the scrape; the registry need not ask now

    def collect(self) -> Iterable[Metric]:
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(f"dreamzero_{name}", text, value=read())
        stats = self._stats()
        yield GaugeMetricFamily("dreamzero_queue_depth", "Calls waiting for the engine.", value=stats.waiting)
        yield GaugeMetricFamily("dreamzero_engine_busy", "1 while a job runs.", value=int(stats.running))
        if stats.policy is None:
            return
        yield GaugeMetricFamily(
            "dreamzero_engine_sessions", "Sessions the engine remembers.", value=stats.policy.sessions
        )
        blocks = GaugeMetricFamily("dreamzero_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["used"], stats.policy.blocks_used)
        blocks.add_metric(["free"], stats.policy.blocks_free)
        yield blocks
        yield GaugeMetricFamily("dreamzero_kv_block_bytes", "Size of a KV block.", value=stats.policy.block_bytes)
        held = GaugeMetricFamily("dreamzero_session_device_bytes", "What sessions hold on the device.", labels=["what"])
        held.add_metric(["windows"], stats.policy.blocks_used * stats.policy.block_bytes)
        held.add_metric(["prompts"], stats.policy.text_bytes)
        held.add_metric(["images"], stats.policy.start_bytes)
        yield held
        yield GaugeMetricFamily(
            "dreamzero_session_most_device_bytes",
            "The most that one session can hold on the device.",
            value=stats.policy.session_bytes,
        )
        yield CounterMetricFamily(
            "dreamzero_kv_evictions", "Sessions whose KV was given to another.", value=stats.policy.evictions
        )
