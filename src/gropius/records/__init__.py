"""The run folder: what is written, how it is read back, and what each metric means. No torch.

with RunWriter.create(folder, resolved.as_dict()) as writer:
    records = records_of(step, groups, trained, decode)
    writer.write_rollouts(step, records)
    writer.write_metrics(step, step_metrics(records) | {"loss": loss})
RunReader(folder).metrics(), RunReader(folder).rollouts(step)
"""

from gropius.records.metrics import METRICS, Metric, step_metrics
from gropius.records.reader import RunReader
from gropius.records.schema import ROLLOUT_SCHEMA, ResponseRecord, Trained, records_of
from gropius.records.writer import RunWriter

__all__ = [
    "METRICS",
    "ROLLOUT_SCHEMA",
    "Metric",
    "ResponseRecord",
    "RunReader",
    "RunWriter",
    "Trained",
    "records_of",
    "step_metrics",
]
