# SPDX-License-Identifier: Apache-2.0
"""Images and videos of prompts, processed once in threads for the rollout engine and the trainer.

A thread decodes the media of a prompt and calls transformers' image processor. The engine's processor gets
the same output instead of computing it again, in later turns of a conversation too. The trainer finds its
inputs, made of this output, in the cache of its media loader.
"""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature

from verl.data.media.cache import Entry
from verl.data.media.decoded import DecodedMedia, video_shape
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData, Reference, reading
from verl.models.families.interface import Kind, join_tensors
from verl.workers.rollout.interface import RolloutRequest

Key = tuple[str | int, str]  # of a medium, and the options of a call

MAX_BYTES = 4 << 30  # of outputs that are kept, in each process
NUM_THREADS = 4
PARTS = {"image_processor": "images", "video_processor": "videos"}  # of a processor; names of their argument
METADATA = "video_metadata"
CONTENT = "content"  # in `info` of a decoded image, which copies and parts keep: its digest and size


def content_of(image: Image.Image) -> str | None:
    """Return the digest of the file and the options of a decoded image, or of a copy; None for others."""
    digest, size = image.info.get(CONTENT, (None, None))
    return digest if size == image.size else None  # a part has another size


class PendingMedia:
    """Media of a prompt that a thread decodes and processes from `start` on."""

    def __init__(self, work: Callable[[], DecodedMedia], threads: Executor) -> None:
        self._work, self._threads = work, threads
        self._started: Future[DecodedMedia] | None = None

    def start(self) -> Future[DecodedMedia]:
        if self._started is None:
            self._started = self._threads.submit(self._work)
        return self._started

    def result(self) -> DecodedMedia:
        """Wait for the media.

        Raises:
            ValueError: A file is missing or corrupt; the message names it.
        """
        return self.start().result()


def with_media(request: RolloutRequest) -> RolloutRequest:
    """Wait for the media of a request.

    Raises:
        ValueError: They cannot be read; the message names the prompt and the file.
    """
    if not isinstance(request.media, PendingMedia):
        return request
    try:
        return replace(request, media=request.media.result())
    except ValueError as error:
        raise ValueError(f"media of the prompt {request.uid}: {error}") from error


class ProcessedMedia:
    """The media that a rollout engine is given, and the outputs of the image processor for them.

    An image is decoded and processed once while a request or a conversation holds it.

    Example::

        media = ProcessedMedia(loader)
        media.share_with(engine.renderer.mm_processor.info)
        images = media.begin({"images": ["cat.png"]}).result().images
    """

    def __init__(self, loader: MediaLoader, max_bytes: int = MAX_BYTES) -> None:
        self.loader, self.outputs = loader, ProcessorOutputs(max_bytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="media")
        self._images: weakref.WeakValueDictionary[str, Image.Image] = weakref.WeakValueDictionary()
        self.outputs.remember_calls(loader.processor)

    def share_with(self, info: Any) -> None:
        """Have vLLM's processor of a model (its `ProcessingInfo`) use the same outputs."""
        theirs = info.get_hf_processor
        info.get_hf_processor = lambda **options: self.outputs.remember_calls(theirs(**options))

    def begin(self, media: MediaData) -> PendingMedia:
        return PendingMedia(partial(self.decode, media), self._threads)

    def decode(self, media: MediaData) -> DecodedMedia:
        """Decode and process a row's media; audio is only decoded."""
        given = media or {}
        others = self.loader.decode({kind: refs for kind, refs in given.items() if kind != "images"})
        decoded = replace(others, images=[self._image(ref) for ref in given.get("images") or ()])
        family, processor = self.loader.family, self.loader.processor
        for ref, image in zip(given.get("images") or (), decoded.images, strict=True):
            with reading("image", ref):
                inputs = family.image_inputs(processor, image)
                facts = family.image_shape(processor, image.height, image.width).facts
            self._give_to_trainer("image", ref, Entry(inputs, facts))
        for ref, (frames, meta) in zip(given.get("videos") or (), decoded.videos, strict=True):
            with reading("video", ref):
                inputs = family.video_inputs(processor, frames, meta)
                facts = video_shape(family, processor, frames, meta).facts
            self._give_to_trainer("video", ref, Entry(inputs, facts))
        return decoded

    def _image(self, ref: Reference) -> Image.Image:
        key = self.loader.feature_key("image", ref)
        known = self._images.get(key)
        if known is not None:
            return known
        [image] = self.loader.decode({"images": [ref]}).images
        image.info[CONTENT] = key, image.size
        return self._images.setdefault(key, image)

    def _give_to_trainer(self, kind: Kind, ref: Reference, entry: Entry) -> None:
        self.loader.cache.get_or_make(self.loader.feature_key(kind, ref), lambda: entry)


class ProcessorOutputs:
    """Outputs of image and video processors for single media, by the media themselves and the options.

    The least recently used ones go first, and those of media that no one holds.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0  # bytes of all tensors that are kept
        self._known: OrderedDict[Key, Future[BatchFeature]] = OrderedDict()
        self._sizes: dict[Key, int] = {}  # of finished calls
        # Finalizers take it, in any thread and at any place: never call a future while holding it.
        self._lock = threading.RLock()

    def remember_calls(self, processor: Any) -> Any:
        """Have the parts of a transformers processor return known outputs; return the processor."""
        for part, argument in PARTS.items():
            theirs = getattr(processor, part, None)
            if callable(theirs) and getattr(type(theirs), "outputs", None) is not self:
                base = getattr(type(theirs), "theirs", type(theirs))
                settings = json.loads(theirs.to_json_string())
                members = {"outputs": self, "theirs": base, "settings": settings, "argument": argument}
                members["__module__"] = base.__module__  # families look there, and files contain the name
                theirs.__class__ = type(base.__name__, (_Remembering, base), members)
        return processor

    def get_or_make(self, medium: Any, options: str, make: Callable[[], BatchFeature]) -> BatchFeature:
        key = _identity(medium), options
        with self._lock:
            known = self._known.get(key)
            if known is None:
                made = self._known[key] = Future()
                weakref.finalize(medium, self._forget, key).atexit = False
            else:
                self._known.move_to_end(key)
        if known is not None:
            return BatchFeature(dict(known.result()))
        try:
            output = make()
        except BaseException as error:
            self._forget(key)
            made.set_exception(error)
            raise
        made.set_result(output)
        self._keep(key, made, _size(output))
        return BatchFeature(dict(output))

    def _keep(self, key: Key, made: Future[BatchFeature], size: int) -> None:
        with self._lock:
            if self._known.get(key) is made:
                self._sizes[key] = size
                self.size += size
            while self.size > self.max_bytes:
                self._forget(next(iter(self._known)))

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._known.pop(key, None)
            removed = self._sizes.pop(key, 0)
            self.size -= removed


class _Remembering:
    """A class to put before an image or video processor's own."""

    outputs: ProcessorOutputs
    theirs: type[Any]
    settings: dict[str, Any]
    argument: str

    def __call__(self, *args: Any, **kwargs: Any) -> BatchFeature:
        theirs = partial(self.theirs.__call__, self)
        media = args[0] if args else kwargs.get(self.argument, ())
        options = {name: value for name, value in kwargs.items() if name != self.argument}
        shows_metadata = bool(options.pop("return_metadata", False))
        key = self._key(options) if len(args) <= 1 and _are_media(media) else None
        if key is None or (METADATA in options and len(media) > 1):  # of all media
            return theirs(*args, **kwargs)
        if METADATA in options:
            options["return_metadata"] = True  # which the engine reads
        alone = [self.outputs.get_or_make(each, key, partial(theirs, [each], **options)) for each in media]
        joined = alone[0] if len(alone) == 1 else _joined(alone)
        if joined is None:
            return theirs(*args, **kwargs)
        if not shows_metadata:
            joined.pop(METADATA, None)
        return joined

    def _key(self, options: Mapping[str, Any]) -> str | None:
        """Name all options of a call, with those of the processor; None if they have no name."""
        if options.get("return_tensors") != "pt":
            return None
        given = {name: value for name, value in {**self.settings, **options}.items() if value is not None}
        try:
            return f"{self.theirs.__name__} {json.dumps(given, sort_keys=True, default=_plain)}"
        except TypeError:
            return None


def _are_media(media: Any) -> bool:
    if not isinstance(media, list | tuple) or not media:
        return False
    return all(isinstance(each, Image.Image) or hasattr(each, "ctypes") for each in media)


def _identity(medium: Any) -> str | int:
    digest = content_of(medium) if isinstance(medium, Image.Image) else None
    return id(medium) if digest is None else digest


def _joined(outputs: list[BatchFeature]) -> BatchFeature | None:
    """Join outputs of single media to that of all; None where a processor would pad them."""
    parts: list[dict[str, Tensor]] = [dict(output) for output in outputs]
    values = [value for part in parts for value in part.values()]
    if not all(isinstance(value, Tensor) and value.ndim for value in values):
        return None
    shapes = [{name: value.shape[1:] for name, value in part.items()} for part in parts]
    return BatchFeature(join_tensors(parts)) if all(shape == shapes[0] for shape in shapes) else None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return {name: each for name, each in vars(value).items() if each is not None}


def _size(output: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in output.values() if isinstance(value, torch.Tensor))
