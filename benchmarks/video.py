# SPDX-License-Identifier: Apache-2.0
"""Time to read 64 frames of a one-hour video compared with a one-minute video, on CPU.

    python benchmarks/video.py [--frames 64] [--keyframe-seconds 2 4 10] [--size 320x180] [--rounds 5]

Both videos are H.264 with reordered frames. The hour repeats the packets of the minute 60 times, so that the
encoding is the same. Both are read with the same options: frames spread evenly over the whole video, at most
64 merged patches each. `in order` is the time of decoding the hour from start to end, without resizing.

Figures are seconds of the fastest round; rounds alternate between the videos. CPU time hardly depends on
other load on the machine. The last line is JSON; its `ratio` is from the first row.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np

from verl.data.media.video import VideoOptions, probe_video, read_video

FPS = 24
CONTAINERS = ("mp4", "mkv")  # mp4 has an index of frame times; Matroska must be scanned for them
HEADER = ("container", "keyframe_s", "minute", "hour", "ratio", "cpu ratio", "in order")


class Seconds(NamedTuple):
    """Duration of a read."""

    wall: float
    cpu: float


def save_minute(path: Path, keyframe_distance: int, width: int, height: int) -> None:
    """Write a one-minute video of a pattern that moves by two pixels per frame."""
    pattern = np.random.default_rng(0).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    pattern = pattern.repeat(8, 0).repeat(8, 1)[:height, :width]
    settings = {"preset": "veryfast", "x264-params": "scenecut=0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=settings)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = keyframe_distance
        for number in range(60 * FPS):
            frame = av.VideoFrame.from_ndarray(np.roll(pattern, 2 * number, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def repeat(source: Path, path: Path, times: int) -> None:
    """Write the packets of a one-minute MP4 file `times` times to one file."""
    with av.open(str(source)) as container, av.open(str(path), "w") as longer:
        stream = container.streams.video[0]
        target = longer.add_stream_from_template(stream)
        packets = [packet for packet in container.demux(stream) if packet.size]
        assert stream.time_base is not None, "MP4 has one"
        minute = round(60 / stream.time_base)
        for start in range(0, times * minute, minute):
            for packet in packets:
                assert packet.pts is not None and packet.dts is not None, "MP4 has both"
                copy = av.Packet(bytes(packet))
                copy.pts, copy.dts = packet.pts + start, packet.dts + start
                copy.duration, copy.time_base = packet.duration, packet.time_base
                copy.is_keyframe, copy.stream = packet.is_keyframe, target
                longer.mux(copy)


def decode_in_order(path: Path) -> int:
    """Decode every frame and return their number."""
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def fastest(readings: dict[str, Callable[[], object]], rounds: int) -> dict[str, Seconds]:
    """Return the fastest of several rounds, alternating between the reads."""
    best = dict.fromkeys(readings, Seconds(float("inf"), float("inf")))
    for _ in range(rounds):
        for name, read in readings.items():
            wall, cpu = time.perf_counter(), time.process_time()
            read()
            took = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
            best[name] = Seconds(min(best[name].wall, took.wall), min(best[name].cpu, took.cpu))
    return best


def compare(folder: Path, container: str, keyframe_s: float, args: argparse.Namespace) -> dict[str, object]:
    """Write both videos and time reading them."""
    source, minute, hour = (folder / f"{name}.{container}" for name in ("source", "minute", "hour"))
    save_minute(source.with_suffix(".mp4"), round(keyframe_s * FPS), *args.size)
    repeat(source.with_suffix(".mp4"), minute, 1)
    repeat(source.with_suffix(".mp4"), hour, 60)
    assert probe_video(str(hour)).num_frames == 60 * probe_video(str(minute)).num_frames

    options = VideoOptions(1, args.tokens * 28 * 28, 28, num_frames=args.frames, tokens_per_frame=args.tokens)
    readings: dict[str, Callable[[], object]] = {
        "minute": lambda: read_video(str(minute), options),
        "hour": lambda: read_video(str(hour), options),
    }
    best = fastest(readings, args.rounds) | fastest({"in order": lambda: decode_in_order(hour)}, 1)
    return {
        "container": container,
        "keyframe_s": keyframe_s,
        "minute": round(best["minute"].wall, 3),
        "hour": round(best["hour"].wall, 3),
        "ratio": round(best["hour"].wall / best["minute"].wall, 2),
        "cpu ratio": round(best["hour"].cpu / best["minute"].cpu, 2),
        "in order": round(best["in order"].wall, 2),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time to read 64 frames of a one-hour video compared with a one-minute video."
    )
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of merged patches per frame")
    parser.add_argument("--keyframe-seconds", type=float, nargs="+", default=[2.0, 4.0, 10.0])
    parser.add_argument("--containers", nargs="+", choices=CONTAINERS, default=CONTAINERS)
    parser.add_argument(
        "--size", type=lambda text: [int(part) for part in text.split("x")], default=[320, 180]
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Print a row for each container and keyframe interval."""
    args = parse_arguments()
    print(" ".join(f"{name:>10}" for name in HEADER))
    rows = []
    for container in args.containers:
        for keyframe_s in args.keyframe_seconds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(Path(folder), container, keyframe_s, args))
            print(" ".join(f"{rows[-1][name]:>10}" for name in HEADER))
            sys.stdout.flush()
    print(json.dumps({"frames": args.frames, "ratio": rows[0]["ratio"], "rows": rows}))


if __name__ == "__main__":
    main()
