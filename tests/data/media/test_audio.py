# SPDX-License-Identifier: Apache-2.0
"""Audio of any format becomes one channel at the model's rate, and its tokens are counted exactly."""

import io
import re
import sys

import av
import numpy as np
import pytest
import torch

from tests.helpers.media import save_video
from tests.helpers.training import QUICKSTART
from verl.config.data import DataConfig
from verl.data.bad_rows import BadRowError
from verl.data.media.audio import AudioOptions, read_audio, wav_bytes
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.messages import build_messages, media_of, references
from verl.data.prompt_template import PromptFormat
from verl.data.readers import load_processor
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from events import NUM_FRAMES, save_film

RATE = 16000
HEARD = DataConfig(use_audio_in_video=True)
OPTIONS = AudioOptions(RATE, longest_s=30)
TONES = {"left": (440, 0.5), "right": (1000, 0.25)}  # Hz and amplitude


def tone(name, rate, seconds=1.0):
    pitch, amplitude = TONES[name]
    return amplitude * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)


def encoded(samples, rate, container, codec):
    """A file of samples (channels, N)."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="stereo" if len(samples) == 2 else "mono")
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32), "fltp", stream.layout.name)
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            stream.format, stream.layout, rate, frame_size=stream.frame_size or None
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def test_samples_at_the_models_rate_are_those_of_the_file():
    samples = np.random.default_rng(0).uniform(-1, 1, 5000).astype(np.float32)

    assert np.array_equal(read_audio(wav_bytes(samples, RATE), OPTIONS), samples)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_channels_are_averaged_and_resampled_to_the_same_tones(rate):
    stereo = np.stack([tone(name, rate) for name in TONES])
    expected = (tone("left", RATE) + tone("right", RATE)) / 2

    found = read_audio(wav_bytes(stereo, rate), OPTIONS)

    assert abs(len(found) - RATE) <= 1
    inner = slice(200, RATE - 200)  # at the ends the filter sees silence
    assert np.abs(found[inner] - expected[inner]).max() < 2e-3


@pytest.mark.parametrize(
    ("container", "codec", "error"),
    [("flac", "flac", 1e-3), ("mp3", "libmp3lame", 0.05), ("mp4", "aac", 0.05)],
)
def test_formats_are_read(container, codec, error, tmp_path):
    path = tmp_path / f"a.{container}"
    path.write_bytes(encoded(tone("left", RATE)[None], RATE, container, codec))

    found = read_audio(str(path), OPTIONS)

    spectrum = np.abs(np.fft.rfft(found[2000:10000]))  # encoders shift the samples
    assert spectrum.argmax() == round(440 * 8000 / RATE)
    assert abs(np.abs(found[2000:10000]).max() - 0.5) < error


def test_a_part_is_that_of_the_whole():
    samples = np.random.default_rng(0).uniform(-1, 1, 3 * RATE).astype(np.float32)
    part = AudioOptions(RATE, longest_s=1.5, audio_start=0.5, audio_end=2.0)

    assert np.array_equal(read_audio(wav_bytes(samples, RATE), part), samples[RATE // 2 : 2 * RATE])


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        (wav_bytes(np.zeros(2 * RATE), RATE), AudioOptions(RATE, longest_s=1.9), "longer than the 1.9 s"),
        (wav_bytes(np.zeros(RATE), RATE), AudioOptions(RATE, 30, audio_start=2.0), "no samples in this part"),
        (b"no audio", OPTIONS, "Invalid data"),
    ],
)
def test_what_cannot_be_heard_is_refused(content, options, reason):
    with pytest.raises(ValueError, match=reason):
        read_audio(content, options)


def test_a_file_without_sound_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no audio stream"):
        read_audio(save_video(tmp_path / "a.mkv", 32, 32, 4), OPTIONS)


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    processor = load_processor(save_tiny_model(tmp_path_factory.mktemp("omni"), "qwen2_5_omni"))
    return MediaLoader(processor, MediaOptions(1, 1 << 20), MediaCache(None))


@pytest.mark.parametrize("samples", [400, 8000, 31999, 32001, 64160, 100_000])
def test_features_and_tokens_are_those_of_the_whole_processor(loader, samples):
    wave = np.random.default_rng(0).uniform(-1, 1, samples).astype(np.float32)
    ref = {"audios": [wav_bytes(wave, RATE)]}
    own = loader.processor(text="<|audio_bos|><|AUDIO|><|audio_eos|>", audio=[wave], return_tensors="pt")

    (medium,), (shape,) = loader.media(ref), loader.measure(ref).audios
    frames = int(own["feature_attention_mask"].sum())

    expected = own["input_features"][0, :, :frames].T
    torch.testing.assert_close(medium.tensors["input_features"], expected, rtol=0, atol=1e-6)
    assert shape.tokens == own["input_ids"][0, 1:-1].tolist()
    assert loader.shape_of(loader.decode(ref)).audios == [shape] and medium.facts == shape.facts


def test_a_sound_too_short_for_a_token_is_a_bad_row(loader):
    with pytest.raises(BadRowError, match="320 samples, too few for a token"):
        loader.measure({"audios": [wav_bytes(np.zeros(320), RATE)]})


def test_arrays_of_datasets_are_audio():
    (ref,) = references({"array": [0.0, 0.5], "sampling_rate": RATE, "path": None}, "audio", None)

    assert read_audio(ref, OPTIONS).tolist() == [0.0, 0.5]


def test_an_item_may_name_the_part_to_read(loader):
    wave = np.random.default_rng(0).uniform(-1, 1, RATE).astype(np.float32)
    (ref,) = references(
        {"bytes": wav_bytes(wave, RATE), "audio_start": 0.25, "audio_end": 0.5}, "audio", None
    )

    ((samples, rate),) = loader.decode({"audios": [ref]}).audios

    assert np.array_equal(samples, wave[4000:8000]) and rate == RATE
    with pytest.raises(BadRowError, match=re.escape("a `audio_start` (2.0) above its `audio_end` (1.0)")):
        references({"path": "a.wav", "audio_start": 2.0, "audio_end": 1.0}, "audio", None)


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    path = tmp_path_factory.mktemp("films") / "one.mp4"
    frames = [np.full((56, 56, 3), 20 * number, dtype=np.uint8) for number in range(NUM_FRAMES)]
    save_film(frames, tone("left", RATE).astype(np.float32), path)
    return str(path)


def row_of(videos, **others):
    return {"videos": videos} | others


def messages_of(row):
    parts = [{"type": kind} for kind in ("video", "audio") for _ in row.get(f"{kind}s", ())]
    return [{"role": "user", "content": parts}]


def heard_media(row):
    return media_of(row, messages_of(row), HEARD, ("image", "video", "audio"))


def test_a_film_is_seen_and_heard_in_turns(loader, film):
    media = heard_media(row_of([film]))

    (shape,) = loader.measure(media).videos
    seen, heard = loader.media(media)

    kinds = dict(zip(loader.family.placeholders(loader.processor), ("image", "video", "audio"), strict=True))
    inside = [kinds[token] for token in shape.tokens[1:-1]]
    assert shape.facts["turns"] == [["video", 2], ["audio", inside.count("audio")]]
    assert inside == sorted(inside, reverse=True) and 25 <= inside.count("audio") <= 27  # AAC adds a little
    assert (seen.kind, heard.kind) == ("video", "audio") and "input_features" not in seen.tensors
    assert len(heard.tensors["input_features"]) == heard.facts["frames"]
    assert loader.shape_of(loader.decode(media)).videos == [shape]


def test_a_part_of_a_film_is_heard_as_it_is_seen(loader, film):
    media = heard_media(row_of([{"video": film, "video_start": 0.25, "video_end": 0.75}]))

    ((samples, _),) = loader.decode(media).sounds
    whole = read_audio(film, OPTIONS)

    assert np.array_equal(samples, whole[RATE // 4 : 3 * RATE // 4])


def test_a_film_without_sound_is_heard_as_silence(loader, tmp_path):
    path = save_video(tmp_path / "a.mkv", 56, 56, 16, fps=8)

    media = heard_media(row_of([path]))

    ((samples, rate),) = loader.decode(media).sounds
    assert not samples.any() and len(samples) == 2 * rate
    assert loader.measure(media).videos[0].facts["turns"][1] == ["audio", 50]


def test_sound_of_films_beside_other_audio_is_a_bad_row(film):
    with pytest.raises(BadRowError, match="audio besides videos whose sound is heard"):
        heard_media(row_of([film], audios=["a.wav"]))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """The loader of a model that hears only."""
    processor = load_processor(save_tiny_model(tmp_path_factory.mktemp("audio"), "qwen2_audio"))
    return MediaLoader(processor, MediaOptions(1, 1 << 20), MediaCache(None))


def test_a_model_that_hears_only_reads_audio_and_no_other_markers(hearing):
    row = {"question": "<audio><image>?", "audios": [{"bytes": wav_bytes(tone("left", RATE), RATE)}]}

    messages = build_messages(row["question"], row, PromptFormat(None), hearing.readable)
    media = media_of(row, messages, HEARD, hearing.readable)

    assert messages[0]["content"] == [{"type": "audio"}, {"type": "text", "text": "<image>?"}]
    assert [len(shape.tokens) for shape in hearing.measure(media).audios] == [25]
    (clip,) = hearing.media(media)
    assert len(clip.tensors["input_features"]) == clip.facts["frames"] + 1  # what the convolutions see


@pytest.mark.parametrize("kind", ["images", "videos"])
def test_what_a_model_that_hears_only_cannot_see_is_a_bad_row(hearing, kind):
    with pytest.raises(BadRowError, match="images or videos, which the model cannot read"):
        media_of({kind: ["a"]}, [{"role": "user", "content": "?"}], HEARD, hearing.readable)


def test_the_longest_clip_of_thirty_seconds_is_heard(hearing):
    def clip(seconds):
        return {"audios": [{"bytes": wav_bytes(np.ones(int(seconds * RATE), dtype=np.float32), RATE)}]}

    assert len(hearing.measure(clip(30)).audios[0].tokens) == 750
    with pytest.raises(ValueError, match="longer than the 30 s that the model hears"):
        hearing.measure(clip(30.1))
