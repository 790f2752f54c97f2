// Chat: a conversation in one lane, or in two with settings of their own.

import { $, chips, make } from "./dom.js";
import { Lane } from "./lane.js";
import { Settings } from "./settings.js";

const EXAMPLES = [
  "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?",
  "Ann has 9 pears. She sells 4 pears. How many are left?",
  "Lena reads 12 pages a day. How many pages does she read in 5 days?",
];

export class Chat {
  constructor(info) {
    this.info = info;
    this.isRunning = null;
    this.settings = [new Settings("Settings", info), new Settings("Second settings", info)];
    this.histories = [[], []];
    $("settings").append(this.settings[0].node, this.settings[1].node);
    this.showCompare();
    $("compare").addEventListener("change", () => this.showCompare());
    $("clear").addEventListener("click", () => this.clear());
    $("stop").addEventListener("click", () => this.isRunning?.abort());
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    const box = $("question");
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask();
    });
    box.addEventListener("input", () => this.grow(box));
    chips($("examples"), EXAMPLES, (text) => {
      box.value = text;
      this.grow(box);
      this.ask();
    });
  }

  grow(box) {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }

  get numLanes() {
    return $("compare").checked ? 2 : 1;
  }

  showCompare() {
    this.settings[1].node.hidden = this.numLanes < 2;
  }

  clear() {
    this.isRunning?.abort();
    this.histories = [[], []];
    $("turns").replaceChildren();
    $("chat-empty").hidden = false;
  }

  async ask() {
    const question = $("question").value.trim();
    if (!question || this.isRunning) return;
    $("question").value = "";
    this.grow($("question"));
    $("chat-empty").hidden = true;
    const lanes = this.settings.slice(0, this.numLanes).map((one) => new Lane(one.name()));
    const shown = make("div", { className: "lanes" }, ...lanes.map((lane) => lane.node));
    $("turns").append(make("div", { className: "asked" }, question), shown);
    shown.scrollIntoView({ block: "nearest" });
    const run = (this.isRunning = new AbortController());
    this.buttons();
    const histories = this.histories;
    await Promise.all(lanes.map((lane, i) => this.answer(lane, i, question, histories[i], run.signal)));
    this.isRunning = null;
    this.buttons();
    $("question").focus({ preventScroll: true });
  }

  async answer(lane, i, question, history, signal) {
    const messages = [...history, { role: "user", content: question }];
    const body = { ...this.settings[i].body(), messages };
    const text = await lane.run("/v1/chat/completions", body, (choice) => choice.delta.content, signal);
    history.push(messages.at(-1), { role: "assistant", content: text });
  }

  buttons() {
    $("send").hidden = this.isRunning !== null;
    $("stop").hidden = this.isRunning === null;
  }
}
