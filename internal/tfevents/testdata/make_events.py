"""Writes events.bin: an event file as TensorBoard's own code writes it (needs tensorboard 2.21, protobuf).

    python make_events.py          (writes beside this file)
"""
import pathlib

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter


def main():
    with open(pathlib.Path(__file__).parent / "events.bin", "wb") as f:
        writer = RecordWriter(f)
        writer.write(Event(wall_time=1700000000.25, file_version="brain.Event:2").SerializeToString())
        start = SessionLog(status=SessionLog.START)
        writer.write(Event(wall_time=1700000000.25, step=200, session_log=start).SerializeToString())
        for step, scalars in ((1, (("loss/train", 2.5), ("lr", 1e-3))), (300, (("loss/train", float("nan")),))):
            event = Event(wall_time=1700000000.25, step=step)
            for tag, value in scalars:
                event.summary.value.add(tag=tag, simple_value=value)
            writer.write(event.SerializeToString())
        writer.flush()


if __name__ == "__main__":
    main()
