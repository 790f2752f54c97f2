// One answer with its denoising, and what it cost.

import { stream } from "./api.js";
import { isAbort, make } from "./dom.js";
import { Replay } from "./replay.js";

const NUMBERS = ["NFE", "TPF", "tokens/s", "tokens", "seconds", "edits"];

export class Lane {
  constructor(title, around) {
    this.replay = new Replay(around);
    this.values = new Map(NUMBERS.map((name) => [name, make("dd", {}, "–")]));
    const numbers = make("dl", { className: "numbers" });
    for (const [name, value] of this.values) numbers.append(make("div", {}, make("dt", {}, name), value));
    this.problem = make("p", { className: "problem", hidden: true });
    this.problem.setAttribute("role", "alert");
    this.node = make(
      "article",
      { className: "lane" },
      make("header", {}, make("b", {}, title)),
      this.replay.node,
      this.problem,
      numbers,
    );
    this.text = "";
    this.frames = 0;
  }

  // Runs a request; returns the text. `textOf` reads it from a choice of a chunk.
  async run(path, body, textOf, signal) {
    const began = performance.now();
    this.node.setAttribute("aria-busy", "true");
    try {
      const asked = { ...body, stream_options: { include_usage: true, continuous_usage_stats: true } };
      for await (const part of stream(path, asked, signal)) {
        if (part.object === "jdllm.denoise") {
          this.frames += 1;
          this.replay.add(part);
        }
        for (const choice of part.choices) this.text += textOf(choice) || "";
        this.count(part.usage, (performance.now() - began) / 1000);
      }
    } catch (error) {
      this.problem.hidden = false;
      this.problem.textContent = isAbort(error) ? "Stopped." : error.message;
    } finally {
      this.node.removeAttribute("aria-busy");
    }
    this.replay.end(this.text);
    return this.text;
  }

  count(usage, seconds) {
    const put = (name, value) => (this.values.get(name).textContent = value);
    put("seconds", seconds.toFixed(2));
    if (!usage) {
      if (this.frames) put("NFE", `≥ ${this.frames}`);
      return;
    }
    const { nfe, tpf, edited_tokens: edits } = usage.dllm;
    put("NFE", nfe);
    put("TPF", tpf.toFixed(2));
    put("tokens", usage.completion_tokens);
    put("tokens/s", (usage.completion_tokens / seconds).toFixed(1));
    put("edits", edits);
  }
}
