"""A bundle behind LitServe: `python litserve_server.py x.etcl 8000`, then POST {"task": T, "b64": ...} to /predict."""

import signal
import sys

import litserve
from fastapi.responses import JSONResponse
from pydantic import Base64Bytes, create_model

from etcl_deploy import EtclError, Predictor, load_bundle
from etcl_deploy.errors import TooLargeError, UnknownTaskError

Question = create_model("Question", task=(str, ...), b64=(Base64Bytes, ...))  # the answer to other bodies is 422
REFUSALS = {UnknownTaskError: (404, "unknown_task"), TooLargeError: (413, "too_large")}  # any other: 400, bad_image


class BundleAPI(litserve.LitAPI):
    def setup(self, device):
        self.predictor = Predictor(load_bundle(self.bundle))

    def decode_request(self, request: Question):
        try:  # what is raised here would answer every request of the batch, so an error goes on as a value
            self.predictor.bundle.task(request.task)
            return request.task, self.predictor.prepare(request.b64)
        except EtclError as error:
            status, code = REFUSALS.get(type(error), (400, "bad_image"))
            return JSONResponse({"error": {"code": code, "message": str(error)}}, status)

    def predict(self, batch):  # one call, whatever tasks the requests name
        good = [item for item in batch if isinstance(item, tuple)]
        answers = iter(self.predictor.answer([image for _, image in good], [task for task, _ in good]))
        return [next(answers).as_json() if isinstance(item, tuple) else item for item in batch]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # without it the workers outlive the server
    api = BundleAPI(max_batch_size=16, batch_timeout=0.01)
    api.bundle, port = sys.argv[1:]
    server = litserve.LitServer(api, accelerator="cpu", max_payload_size=6_553_500)
    server.run(host="127.0.0.1", port=port, generate_client_file=False)
