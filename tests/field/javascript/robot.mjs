// A robot in JavaScript: node robot.mjs URL LIBRARY, with LIBRARY "@msgpack/msgpack" or "msgpackr".
// Prints one line of JSON with what it understood of each answer.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, library] = process.argv.slice(2);
const installed = createRequire(pathToFileURL(process.cwd() + "/")); // packages lie where node was started
const { WebSocket } = installed("ws");
const { encode, decode } = installed(library);

// An array as openpi-client sends it. A typed array alone would arrive as bytes without type and shape.
function array(values, dtype, shape) {
  const data = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  return { __ndarray__: true, data, dtype, shape };
}

// Copied, because a Float32Array must begin at a multiple of four bytes, and the data in a frame may not.
function floats({ data }) {
  return new Float32Array(Uint8Array.from(data).buffer);
}

function frame(socket) {
  return new Promise((resolve, reject) => {
    socket.once("message", (data, isBinary) => resolve(isBinary ? decode(data) : data.toString()));
    socket.once("close", (code, reason) => reject(new Error(`closed with ${code} ${reason}`)));
    socket.once("error", reject);
  });
}

const image = Uint8Array.from({ length: 180 * 320 * 3 }, (_, index) => index % 251);
const observation = {
  endpoint: "infer",
  "observation/exterior_image_0_left": array(image, "|u1", [180, 320, 3]),
  "observation/exterior_image_1_left": array(image, "|u1", [180, 320, 3]),
  "observation/wrist_image_left": array(image, "|u1", [180, 320, 3]),
  "observation/joint_position": array(Float32Array.from([0, -0.5, 0, -2, 0, 1.5, 0.25]), "<f4", [7]),
  "observation/gripper_position": [0],
  prompt: "put the cup on the plate",
  session_id: "dashboard",
  sent_at: Date.now(),
  taken_at: new Date(),
};

const socket = new WebSocket(url);
const handshake = await frame(socket);
const ask = (message) => {
  const answer = frame(socket);
  socket.send(encode(message));
  return answer;
};
const reply = await ask(observation);
if (typeof reply === "string") throw new Error(reply);
const second = await ask(observation);
const error = await ask({ ...observation, prompt: 3 });
const reset = await ask({ endpoint: "reset", session_id: "dashboard" });
const again = await ask(observation);
socket.close();

console.log(
  JSON.stringify({
    handshake,
    keys: Object.keys(reply),
    shape: reply.actions.shape,
    dtype: reply.actions.dtype,
    actions: Array.from(floats(reply.actions)),
    again: Array.from(floats(again.actions)),
    timing: second.server_timing,
    error,
    reset,
  }),
);
