// Infilling: a gap in a text, which one drags to where the model shall write.

import { post } from "./api.js";
import { $, isAbort, make, number } from "./dom.js";
import { Lane } from "./lane.js";
import { Settings } from "./settings.js";

const QUESTION = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?";
const TEXT = "7 + 5 = 12\n#### 12";

export class Infill {
  constructor(info) {
    this.settings = new Settings("Settings", info, { maxTokens: "" });
    this.settings.tokens.parentElement.hidden = true;
    $("infill-settings").append(this.settings.node);
    $("infill-question").value = QUESTION;
    $("infill-text").value = TEXT;
    this.from = 2; // the gap takes the words [from, to)
    this.to = 5;
    this.isRunning = null;
    this.chip = make("span", { className: "gap", tabIndex: 0, id: "gap" });
    this.chip.setAttribute("role", "slider");
    this.chip.setAttribute("aria-label", "Gap");
    this.chip.addEventListener("keydown", (event) => this.key(event));
    const area = $("infill-words");
    area.addEventListener("pointerdown", (event) => this.down(event));
    area.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) area.addEventListener(name, () => this.up());
    $("infill-text").addEventListener("input", () => this.split());
    $("infill-length").addEventListener("input", () => this.draw());
    $("fill").addEventListener("click", () => this.fill());
    $("fill-stop").addEventListener("click", () => this.isRunning?.abort());
    this.split();
  }

  // Words keep the space before them, as the tokens of these models do.
  split() {
    this.words = $("infill-text").value.match(/\s*\S+|\s+$/g) || [];
    this.to = Math.min(this.to, this.words.length);
    this.from = Math.min(this.from, this.to);
    this.draw();
  }

  draw() {
    const word = (text, i) =>
      make("span", { className: i >= this.from && i < this.to ? "word taken" : "word", data: { i } }, text);
    const nodes = this.words.map(word);
    this.chip.textContent = `gap of ${$("infill-length").value || "?"} tokens`;
    this.chip.setAttribute("aria-valuemin", 0);
    this.chip.setAttribute("aria-valuemax", this.words.length);
    this.chip.setAttribute("aria-valuenow", this.from);
    this.chip.setAttribute("aria-valuetext", `before word ${this.to + 1}, replaces ${this.to - this.from} words`);
    const hasFocus = document.activeElement === this.chip;
    nodes.splice(this.to, 0, this.chip);
    $("infill-words").replaceChildren(...nodes);
    if (hasFocus) this.chip.focus();
  }

  // The word under a pointer, or undefined.
  at(event) {
    const found = document.elementFromPoint(event.clientX, event.clientY)?.closest?.(".word");
    return found && $("infill-words").contains(found) ? Number(found.dataset.i) : undefined;
  }

  down(event) {
    const isGap = event.target === this.chip;
    const word = this.at(event);
    if (!isGap && word === undefined) return;
    event.preventDefault();
    $("infill-words").setPointerCapture(event.pointerId);
    this.held = isGap ? "gap" : "words";
    this.chip.classList.toggle("held", isGap);
    if (isGap) return;
    this.first = word;
    this.from = word;
    this.to = word + 1;
    this.draw();
  }

  move(event) {
    if (!this.held) return;
    const word = this.at(event);
    if (word === undefined) return;
    if (this.held === "words") {
      this.from = Math.min(this.first, word);
      this.to = Math.max(this.first, word) + 1;
    } else {
      // It lands behind the word's middle or before it, and takes as many words as before.
      const box = document.elementFromPoint(event.clientX, event.clientY).getBoundingClientRect();
      const width = this.to - this.from;
      const to = word + (event.clientX > box.x + box.width / 2 ? 1 : 0);
      this.to = Math.max(width, to);
      this.from = this.to - width;
    }
    this.draw();
  }

  up() {
    this.held = null;
    this.chip.classList.remove("held");
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const to = this.to + by;
    if (to > this.words.length || to < 0) return;
    if (event.shiftKey) {
      if (to < this.from) return;
      this.to = to;
    } else if (this.from + by >= 0) {
      this.from += by;
      this.to = to;
    }
    this.draw();
  }

  async fill() {
    if (this.isRunning) return;
    const before = this.words.slice(0, this.from).join("");
    const after = this.words.slice(this.to).join("");
    const lane = new Lane(`Gap of ${$("infill-length").value} tokens: ${this.settings.name()}`, { before, after });
    $("infill-answer").prepend(lane.node);
    const run = (this.isRunning = new AbortController());
    this.buttons();
    try {
      const prompt = await this.promptIds(before, run.signal);
      const body = { ...this.settings.body(), prompt, suffix: after, max_tokens: number($("infill-length")) };
      await lane.run("/v1/completions", body, (choice) => choice.text, run.signal);
    } catch (error) {
      lane.problem.hidden = false;
      lane.problem.textContent = isAbort(error) ? "Stopped." : error.message;
    }
    this.isRunning = null;
    this.buttons();
  }

  // The model's own chat template around the question, and the text before the gap as its answer.
  async promptIds(before, signal) {
    const question = $("infill-question").value.trim();
    if (!question) {
      return (await post("/tokenize", { prompt: before }, signal)).tokens;
    }
    const messages = [{ role: "user", content: question }];
    const head = await post("/tokenize", { messages, add_generation_prompt: true }, signal);
    if (!before) return head.tokens;
    const tail = await post("/tokenize", { prompt: before, add_special_tokens: false }, signal);
    return [...head.tokens, ...tail.tokens];
  }

  buttons() {
    $("fill").hidden = this.isRunning !== null;
    $("fill-stop").hidden = this.isRunning === null;
  }
}
