#!/usr/bin/env python3
"""Serve a classifier of photographs over HTTP, as users of PyTorch and ONNX Runtime write it.

  server.py FOLDER --model resnet18 --port 8000 --engine eager|compile|onnx --batching none|queue|litserve [--max-batch 8]

FOLDER is what make_models.py wrote. POST a photograph to /; the answer is {"classes": [{"label": 3, ...}, ...]}.

Engines: PyTorch eager; torch.compile; ONNX Runtime. Batching: none runs each request in FastAPI's thread pool, a lock
around the model; queue collects what waits in a queue (asyncio), up to --max-batch, and decodes in a thread pool;
litserve is LitServe with its own batching and a process that computes.
"""

import argparse
import asyncio
import concurrent.futures
import io
import os
import threading

import torch
from PIL import Image
from torchvision import models, transforms

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TOP = 5


def transform():
    return transforms.Compose(
        [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )


def decode(body, pipeline):
    """A photograph as a tensor [3, 224, 224]."""
    return pipeline(Image.open(io.BytesIO(body)).convert("RGB"))


def pytorch(options):
    """A function from a batch to probabilities, of PyTorch."""
    from safetensors.torch import load_file

    net = models.get_model(options.model, weights=None)
    net.load_state_dict(load_file(os.path.join(options.folder, options.model + ".safetensors")))
    dtype = getattr(torch, options.dtype)
    net = net.eval().to(options.device, dtype)
    form = torch.channels_last if options.channels_last else torch.contiguous_format
    net = net.to(memory_format=form)
    run = torch.compile(net, dynamic=False, mode=options.mode) if options.engine == "compile" else net

    def compute(images):
        with torch.inference_mode():
            x = images.to(options.device, dtype, memory_format=form)
            return run(x).float().softmax(1).cpu()

    return compute


def onnx(options):
    """A function from a batch to probabilities, of ONNX Runtime."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    providers = ["CUDAExecutionProvider"] if options.device != "cpu" else ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(os.path.join(options.folder, options.model + ".onnx"), settings, providers)

    def compute(images):
        return torch.from_numpy(session.run(None, {"x": images.numpy()})[0]).softmax(1)

    return compute


def engine(options):
    """The engine, warmed up."""
    torch.set_num_threads(options.threads)
    compute = onnx(options) if options.engine == "onnx" else pytorch(options)
    for size in sizes(options):
        for _ in range(3):
            compute(torch.zeros(size, 3, 224, 224))
    return compute


def sizes(options):
    """The sizes of the batches with which the engine is warmed up, and to which batches are padded for torch.compile."""
    if options.batching == "none":
        return [1]
    if options.sizes:
        return [int(size) for size in options.sizes.split(",")]
    found, size = [], 1
    while size < options.max_batch:
        found.append(size)
        size *= 2
    return [*found, options.max_batch]


def padded(images, options):
    """A batch of the images. torch.compile compiles each size, so zeros fill it up to the next one of sizes(options)."""
    batch = torch.stack(images)
    if options.engine == "compile":
        size = next(s for s in sizes(options) if s >= len(images))
        batch = torch.cat([batch, batch.new_zeros(size - len(images), *batch.shape[1:])])
    return batch


def answer(probabilities):
    """The JSON of an answer."""
    top = probabilities.topk(TOP)
    return {"classes": [{"label": int(label), "probability": float(p)} for p, label in zip(top.values, top.indices, strict=True)]}


def fastapi_app(options):
    """The application without batches: a request is decoded and computed by one thread of the pool."""
    from fastapi import FastAPI, HTTPException, Request
    from starlette.concurrency import run_in_threadpool

    app, compute, pipeline, lock = FastAPI(), engine(options), transform(), threading.Lock()

    def classify(body):
        try:
            image = decode(body, pipeline)
        except OSError as error:
            raise HTTPException(415, str(error)) from None
        with lock:
            return answer(compute(image[None])[0])

    @app.post("/")
    async def post(request: Request):
        return await run_in_threadpool(classify, await request.body())

    return app


def queue_app(options):
    """The application with a queue: decoding in a pool of threads, and one thread that computes what waits."""
    from contextlib import asynccontextmanager

    from fastapi import FastAPI, HTTPException, Request

    decoders = concurrent.futures.ThreadPoolExecutor(options.threads)
    computer = concurrent.futures.ThreadPoolExecutor(1)
    compute = computer.submit(engine, options).result()  # CUDA graphs of torch.compile belong to a thread
    pipeline = transform()
    waiting = asyncio.Queue()

    def batch(images):
        return compute(padded(images, options))[: len(images)]

    async def work():
        loop = asyncio.get_running_loop()
        while True:
            items = [await waiting.get()]
            while len(items) < options.max_batch and not waiting.empty():
                items.append(waiting.get_nowait())
            try:
                rows = await loop.run_in_executor(computer, batch, [image for image, _ in items])
            except Exception as error:  # the requests get it
                rows = [error] * len(items)
            for (_, future), row in zip(items, rows, strict=True):
                if not future.cancelled():
                    future.set_exception(row) if isinstance(row, Exception) else future.set_result(row)

    @asynccontextmanager
    async def lifespan(_):
        task = asyncio.create_task(work())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/")
    async def post(request: Request):
        loop = asyncio.get_running_loop()
        try:
            image = await loop.run_in_executor(decoders, decode, await request.body(), pipeline)
        except OSError as error:
            raise HTTPException(415, str(error)) from None
        future = loop.create_future()
        await waiting.put((image, future))
        return answer(await future)

    return app


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder")
    p.add_argument("--model", default="resnet18")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--engine", default="eager", choices=["eager", "compile", "onnx"])
    p.add_argument("--batching", default="none", choices=["none", "queue", "litserve"])
    p.add_argument("--max-batch", type=int, default=8)
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--channels-last", action="store_true")
    p.add_argument("--mode", help="of torch.compile, such as reduce-overhead, which replays CUDA graphs")
    p.add_argument("--sizes", help="for which torch.compile compiles (default: powers of two up to --max-batch)")
    p.add_argument("--warm-only", action="store_true", help="only compile, to fill torch.compile's cache")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = p.parse_args()
    if options.warm_only:
        engine(options)
        return
    if options.batching == "litserve":
        from litserve_server import serve

        serve(options)
        return
    import uvicorn

    app = queue_app(options) if options.batching == "queue" else fastapi_app(options)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
