// Draws, prepares, asks onnxruntime-web, shows. The model holds all tasks; its input task_id chooses one.
import * as ort from "./ort.mjs";

const SHOWN = 6;
const STEP = 8; // pixels of the pad that an arrow key moves the pen
const $ = (id) => document.getElementById(id);
const pad = $("pad");
const paper = pad.getContext("2d", { willReadFrequently: true });
const pen = { x: pad.width / 2, y: pad.height / 2, down: false };

let about, session;
let source = pad; // what is looked at: the drawing, or an image that was opened, at its own size
let turn = 0; // of the latest question: answers to earlier ones are not shown

ort.env.wasm.wasmPaths = { wasm: new URL("ort-wasm-simd-threaded.wasm", import.meta.url).href };
ort.env.wasm.numThreads = 1; // more need headers that a plain static server does not send

export const ready = start();
ready.then(clear, (error) => say(`Could not start: ${error.message}`));

async function fetched(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response;
}

async function start() {
  about = await (await fetched("tasks.json")).json();
  const model = await (await fetched("tasks.onnx")).arrayBuffer();
  session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
}

function say(text) {
  $("status").textContent = text;
}

/** What the network sees: uint8 [height, width, channels]. */
export function pixels() {
  const { height, width, channels } = about.preprocessing;
  const seen = $("seen");
  seen.width = width;
  seen.height = height;
  const context = seen.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const found = new Uint8Array(height * width * channels);
  for (let at = 0; at < height * width; at += 1) {
    const [red, green, blue] = data.subarray(4 * at, 4 * at + 3);
    if (channels === 3) found.set([red, green, blue], 3 * at);
    else found[at] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16; // as Pillow does
  }
  return found;
}

/** Probabilities of every class of a task for prepared pixels, and how long that took. */
export async function ask(image, task) {
  const { height, width, channels } = about.preprocessing;
  const inputs = {
    image: new ort.Tensor("uint8", image, [1, height, width, channels]),
    task_id: new ort.Tensor("int64", BigInt64Array.of(BigInt(task)), []),
  };
  const began = performance.now();
  const { probabilities } = await session.run(inputs, ["probabilities"]);
  return { scores: Array.from(probabilities.data), milliseconds: performance.now() - began };
}

let busy = Promise.resolve(); // a session answers one question at a time

export function answer() {
  turn += 1;
  const mine = turn;
  const task = Number($("task").value);
  busy = busy
    .then(async () => {
      await ready;
      if (mine !== turn) return;
      const { scores, milliseconds } = await ask(pixels(), task);
      if (mine === turn) show(about.tasks[task], scores, milliseconds);
    })
    .catch((error) => say(`No answer: ${error.message}`));
  return busy;
}

function show(task, scores, milliseconds) {
  const order = scores.map((_, index) => index).sort((a, b) => scores[b] - scores[a]);
  $("label").textContent = task.classes[order[0]];
  $("scores").replaceChildren(...order.slice(0, SHOWN).map((index) => row(task.classes[index], scores[index])));
  $("scores").dataset.scores = JSON.stringify(scores);
  say(`${milliseconds.toFixed(1)} ms in this browser`);
  const accuracy = task.accuracy === null ? "" : `, ${task.accuracy.toFixed(1)} % right on its test images`;
  $("about").textContent = `What the network sees. ${task.classes.length} classes${accuracy}.`;
}

function row(name, score) {
  const item = document.createElement("li");
  const parts = ["span", "span", "span"].map((tag) => document.createElement(tag));
  parts[0].textContent = name;
  parts[0].title = name;
  parts[1].className = "bar";
  parts[1].append(document.createElement("i"));
  parts[1].firstChild.style.width = `${100 * score}%`;
  parts[2].textContent = `${(100 * score).toFixed(1)} %`;
  item.append(...parts);
  return item;
}

const colours = () => ($("light").checked ? ["#fff", "#000"] : ["#000", "#fff"]);

function clear() {
  source = pad;
  [paper.fillStyle] = colours();
  paper.fillRect(0, 0, pad.width, pad.height);
  answer();
}

function line(from, to) {
  source = pad;
  [, paper.strokeStyle] = colours();
  paper.lineWidth = pad.width / 10;
  paper.lineCap = paper.lineJoin = "round";
  paper.beginPath();
  paper.moveTo(from.x, from.y);
  paper.lineTo(to.x, to.y);
  paper.stroke();
  answer();
}

async function open(blob) {
  turn += 1;
  const mine = turn;
  const image = await createImageBitmap(blob).catch(() => null);
  if (mine !== turn) return; // something else was drawn or opened meanwhile
  if (image === null) {
    say("That is not an image this browser can read.");
    return;
  }
  source = image;
  paper.fillStyle = "#fff";
  paper.fillRect(0, 0, pad.width, pad.height);
  paper.imageSmoothingEnabled = source.width > pad.width;
  paper.drawImage(source, 0, 0, pad.width, pad.height);
  await answer();
}

const place = (event) => {
  const box = pad.getBoundingClientRect();
  return { x: ((event.clientX - box.x) / box.width) * pad.width, y: ((event.clientY - box.y) / box.height) * pad.height };
};
let stroke = null; // the pointer that draws, and where it was
pad.addEventListener("pointerdown", (event) => {
  if (!event.isPrimary || event.button) return;
  pad.setPointerCapture(event.pointerId);
  stroke = { id: event.pointerId, at: place(event) };
  line(stroke.at, stroke.at);
});
pad.addEventListener("pointermove", (event) => {
  if (stroke?.id !== event.pointerId) return;
  const now = place(event);
  line(stroke.at, now);
  stroke.at = now;
});
for (const over of ["pointerup", "pointercancel"]) pad.addEventListener(over, () => (stroke = null));

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
pad.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key in MOVES) {
    const before = { ...pen };
    pen.x = Math.min(pad.width, Math.max(0, pen.x + STEP * MOVES[event.key][0]));
    pen.y = Math.min(pad.height, Math.max(0, pen.y + STEP * MOVES[event.key][1]));
    if (pen.down) line(before, pen);
  } else if (event.key === " ") {
    if (!event.repeat) pen.down = !pen.down;
    if (pen.down) line(pen, pen);
  } else if (event.key === "Escape") {
    pen.down = false;
    clear();
  } else return;
  event.preventDefault();
  showPen();
});
for (const name of ["focus", "blur"]) pad.addEventListener(name, showPen);

/** Where the keyboard's pen is, while the pad has the focus of the keyboard: full when it is down. */
function showPen() {
  const marker = $("pen");
  marker.hidden = !pad.matches(":focus-visible");
  marker.classList.toggle("down", pen.down);
  marker.style.left = `${(100 * pen.x) / pad.width}%`;
  marker.style.top = `${(100 * pen.y) / pad.height}%`;
}

$("task").addEventListener("change", answer);
$("clear").addEventListener("click", clear);
$("light").addEventListener("change", clear);
$("choose").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  $("file").value = ""; // so that the same one can be opened again
  if (file) open(file);
});
document.addEventListener("paste", (event) => event.clipboardData.files[0] && open(event.clipboardData.files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    pad.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) open(event.dataTransfer.files[0]);
  });
}
