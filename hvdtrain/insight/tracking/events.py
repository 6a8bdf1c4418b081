"""The records of a TensorBoard event file, as bytes."""

import io
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName, Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary


def file_name() -> str:
    """Return the name of a new event file of this process, in the form that TensorBoard recognises."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"


def version() -> bytes:
    """Return the first record of an event file."""
    return _frame(Event(wall_time=time.time(), file_version="brain.Event:2"))


def scalars(values: Mapping[str, float], step: int) -> bytes:
    """Return a record of numbers by tag."""
    return _record(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)


def text(tag: str, markdown: str) -> bytes:
    """Return a record of text in Markdown."""
    record = summary.text(tag, markdown)
    record.value[0].tag = tag  # torch appends a suffix
    return _record(record, 0)


def image(tag: str, png: bytes, step: int) -> bytes:
    """Return a record of a picture."""
    width, height = Image.open(io.BytesIO(png)).size
    picture = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    return _record(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)


def hparams_start(settings: Mapping[str, Any], metrics: Mapping[str, str]) -> bytes:
    """Return a run's row on the HPARAMS page; `metrics` maps the tags whose last values are shown to their titles.

    The first five settings are shown by default. All runs on a page need the same settings, because TensorBoard takes
    them from a single run; None is left empty.
    """
    infos: list[HParamInfo] = []
    start = SessionStartInfo(start_time_secs=time.time())
    for name, setting in settings.items():
        value = ("yes" if setting else "no") if isinstance(setting, bool) else setting
        is_text = value is not None and not isinstance(value, int | float)
        infos.append(
            HParamInfo(
                name=name,
                display_name=name.replace("_", " "),
                type=DataType.Value("DATA_TYPE_STRING" if is_text else "DATA_TYPE_FLOAT64"),
                differs=len(infos) < 5,
            )
        )
        if is_text:
            start.hparams[name].string_value = str(value)
        elif value is not None:
            start.hparams[name].number_value = value
    metric_infos = [MetricInfo(name=MetricName(tag=tag), display_name=title) for tag, title in metrics.items()]
    experiment = HParamsPluginData(experiment=Experiment(hparam_infos=infos, metric_infos=metric_infos))
    return _plugin_record(metadata.EXPERIMENT_TAG, experiment) + _plugin_record(
        metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)
    )


def hparams_end(*, finished: bool) -> bytes:
    """Return the end of the run's row on the HPARAMS page."""
    status = Status.Value("STATUS_SUCCESS" if finished else "STATUS_FAILURE")
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _plugin_record(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))


def _plugin_record(tag: str, content: HParamsPluginData) -> bytes:
    plugin = metadata.create_summary_metadata(content)
    value = Summary.Value(tag=tag, metadata=plugin, tensor=metadata.NULL_TENSOR)
    return _record(Summary(value=[value]), 0)


def _record(content: Summary, step: int) -> bytes:
    return _frame(Event(wall_time=time.time(), step=step, summary=content))


def _frame(event: Event) -> bytes:
    frame = io.BytesIO()
    RecordWriter(frame).write(event.SerializeToString())
    return frame.getvalue()
