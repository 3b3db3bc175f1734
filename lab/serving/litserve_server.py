"""The server of server.py with LitServe, which computes in another process and makes batches itself."""

from typing import Annotated

import litserve
from fastapi import Body, HTTPException
from server import answer, decode, engine, padded, transform


class Classifier(litserve.LitAPI):
    def __init__(self, options):
        super().__init__(max_batch_size=options.max_batch, batch_timeout=0.002, api_path="/predict")
        self.options = options

    def setup(self, device):
        self.compute, self.pipeline = engine(self.options), transform()

    def decode_request(self, request: Annotated[bytes, Body()]):
        try:
            return decode(request, self.pipeline)
        except OSError as error:
            raise HTTPException(415, str(error)) from None

    def batch(self, inputs):
        return inputs

    def predict(self, x):
        images = x if isinstance(x, list) else [x]
        rows = self.compute(padded(images, self.options))[: len(images)]
        return rows if isinstance(x, list) else rows[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return answer(output)


def serve(options):
    accelerator = "cpu" if options.device == "cpu" else "cuda"
    server = litserve.LitServer(Classifier(options), accelerator=accelerator, workers_per_device=1)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False)
