"""The program of the separate process that decodes images and reads documents. It reads requests from standard input,
and writes one answer for each request (`messages.py`).

Image decoders and PDFium are native code that reads an agent's bytes, so the process is confined. It can read Python's
files. It cannot write files, open sockets, start programs or send signals, and its memory is limited. If a file takes
too much processor time, the kernel kills the process with SIGPROF. Invariant: the process ends when its standard input
ends. So it also ends when its parent process is killed.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
from importlib.util import find_spec
from typing import BinaryIO

import msgspec

from outrider.evaluators.checks.confinement import SETITIMER, calculation, confine_zygote
from outrider.sandbox.runtimes.guest.isolation import seccomp
from outrider.tokens.rendering.image_grids import ImageForm
from outrider.vision.documents import UnreadableDocument, pages_of
from outrider.vision.messages import LENGTH, DocumentAnswer, DocumentRequest, ImageAnswer, ImageRequest
from outrider.vision.pixels import UnreadableImage, pixels_of, png_item, vllm_item

MAX_MEMORY = 3 << 30
"""Maximum size of the process's address space, in bytes. Decoding an image of MAX_PIXELS pixels takes half a
gigabyte."""


def main() -> None:
    _load()
    confine_zygote()
    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CORE, seccomp.core_limit()),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    machine = os.uname().machine
    seccomp.install(calculation(machine, SETITIMER[machine]))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def _load() -> None:
    """Import and try the installed decoders before the process is confined."""
    if find_spec("PIL") is not None:
        from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

        for plugin in (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin):
            assert plugin.__name__
        Image.new("RGB", (2, 2)).resize((4, 4), Image.Resampling.BICUBIC).save(io.BytesIO(), "PNG")
    if find_spec("pypdfium2") is not None:
        import pypdfium2

        document = pypdfium2.PdfDocument.new()
        page = document.new_page(16, 16)
        if find_spec("PIL") is not None:
            page.render().to_pil()
        page.get_textpage().get_text_bounded()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    decoder = msgspec.msgpack.Decoder(ImageRequest | DocumentRequest)
    while len(length := requests.read(LENGTH)) == LENGTH:
        request = decoder.decode(requests.read(int.from_bytes(length, "little")))
        signal.setitimer(signal.ITIMER_PROF, request.cpu_seconds)
        answer = msgspec.msgpack.encode(answer_to(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(LENGTH, "little"))
        answers.write(answer)
        answers.flush()


def answer_to(request: ImageRequest | DocumentRequest) -> ImageAnswer | DocumentAnswer:
    if isinstance(request, DocumentRequest):
        try:
            return DocumentAnswer(pages_of(request.data, request.settings))
        except UnreadableDocument as error:
            return DocumentAnswer(fault=str(error))
    try:
        if request.form is ImageForm.PNG:
            return ImageAnswer(*png_item(request.data, request.settings))
        pixels = pixels_of(request.data, request.settings)
        return ImageAnswer(pixels.grid, vllm_item(pixels))
    except UnreadableImage as error:
        return ImageAnswer(fault=str(error))
    except MemoryError:
        return ImageAnswer(fault="the image takes too much memory")
