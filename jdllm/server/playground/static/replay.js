// What an answer looked like after each step, and the controls that go through it again.
//
// A frame of the server replaces all positions from its `start` on. Every picture keeps, for each
// position, in which frame its token came and whether it gave way to another one since.

import { make } from "./dom.js";

const FRAME_MS = 90; // of a replay
const EMPTY = Object.freeze({ id: null, text: "", conf: null, at: 0, edited: false });

function nextPicture(before, frame, at) {
  const cells = before.cells.slice(0, frame.start);
  frame.canvas.forEach(({ id, text, conf }, i) => {
    const old = before.cells[frame.start + i] || EMPTY;
    if (id === null) cells.push(EMPTY);
    else if (old.id === id) cells.push(old);
    else cells.push({ id, text, conf, at, edited: old.edited || old.id !== null });
  });
  const cuts = before.cuts.slice();
  if (frame.committed > (cuts.at(-1) || 0)) cuts.push(frame.committed);
  return { cells, cuts, step: frame.step };
}

export class Replay {
  // `before` and `after` stand around the positions: the text around a gap.
  constructor({ before = "", after = "" } = {}) {
    this.pictures = [];
    this.shown = -1;
    this.around = { before, after };
    this.follows = true;
    this.timer = null;
    this.drawing = 0;
    this.view = make("div", { className: "canvas" });
    this.view.setAttribute("aria-hidden", "true");
    this.spoken = make("p", { className: "hidden" });
    this.spoken.setAttribute("aria-live", "polite");
    this.play = make("button", { type: "button" }, "Replay");
    this.scrubber = make("input", { type: "range", min: 0, max: 0, value: 0 });
    this.scrubber.setAttribute("aria-label", "Frame of the denoising");
    this.place = make("output");
    this.bar = make("div", { className: "replay" }, this.play, this.scrubber, this.place);
    this.bar.hidden = true;
    this.node = make("div", {}, this.view, this.spoken, this.bar);
    this.scrubber.addEventListener("input", () => {
      this.pause();
      this.follows = false;
      this.show(Number(this.scrubber.value));
    });
    this.play.addEventListener("click", () => (this.timer ? this.pause() : this.start()));
  }

  add(frame) {
    const before = this.pictures.at(-1) || { cells: [], cuts: [], step: 0 };
    this.pictures.push(nextPicture(before, frame, this.pictures.length));
    this.scrubber.max = this.pictures.length - 1;
    this.bar.hidden = this.pictures.length < 2;
    if (this.follows && !this.drawing) this.drawing = requestAnimationFrame(() => this.catchUp());
  }

  // Frames come several at a time; each is seen, faster where many wait.
  catchUp() {
    this.drawing = 0;
    if (!this.follows) return;
    const left = this.pictures.length - 1 - this.shown;
    if (left <= 0) return;
    this.show(this.shown + Math.max(1, Math.ceil(left / 12)));
    this.drawing = requestAnimationFrame(() => this.catchUp());
  }

  // The answer is complete: `text` is what the API returned.
  end(text) {
    this.spoken.textContent = text;
    if (this.pictures.length === 0) this.view.textContent = text;
  }

  start() {
    this.follows = false;
    this.play.textContent = "Pause";
    if (this.shown >= this.pictures.length - 1) this.show(0);
    this.timer = setInterval(() => {
      if (this.shown >= this.pictures.length - 1) this.pause();
      else this.show(this.shown + 1);
    }, FRAME_MS);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Replay";
  }

  show(index) {
    const picture = this.pictures[index];
    if (!picture) return;
    this.shown = index;
    this.scrubber.value = index;
    this.place.value = `frame ${index + 1} of ${this.pictures.length}`;
    const nodes = this.around.before ? [this.fixed(this.around.before)] : [];
    const last = this.pictures.length - 1;
    const cuts = new Set(picture.cuts);
    picture.cells.forEach((cell, i) => {
      nodes.push(this.cell(cell, index, last));
      if (cuts.has(i + 1)) nodes.push(make("i", { className: "cut" }));
    });
    if (this.around.after) nodes.push(this.fixed(this.around.after));
    this.view.replaceChildren(...nodes);
  }

  fixed(text) {
    return make("span", { className: "fixed" }, text);
  }

  cell(cell, index, last) {
    const node = make("span", { className: "cell" });
    if (cell.id === null) return node;
    node.textContent = cell.text;
    node.classList.add("decided");
    node.classList.toggle("end", cell.text === "");
    node.classList.toggle("edited", cell.edited);
    node.classList.toggle("fresh", cell.at === index && index < last);
    node.style.setProperty("--t", cell.at / Math.max(1, last));
    node.style.setProperty("--c", cell.conf ?? 1);
    const sure = cell.conf === null ? "given" : `${(100 * cell.conf).toFixed(1)} %`;
    node.title = `frame ${cell.at + 1}, confidence ${sure}${cell.edited ? ", edited" : ""}`;
    return node;
  }

  // The text of the frame that is shown.
  text() {
    const picture = this.pictures[this.shown];
    return picture ? picture.cells.map((cell) => cell.text).join("") : "";
  }
}
