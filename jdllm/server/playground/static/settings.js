// Controls for the options of a model's algorithms, made from what /model_info says of them.

import { field, make, number } from "./dom.js";

const PHONE = "(max-width: 860px)"; // as in style.css: settings stand above the chat there
const FIRST = ["threshold", "block_length", "cache_mode", "steps", "edit_threshold"];

export class Settings {
  constructor(title, info, { isOpen = !matchMedia(PHONE).matches, maxTokens = 128 } = {}) {
    this.info = info;
    this.options = new Map();
    this.algorithm = make("select");
    for (const name of Object.keys(info.dllm.algorithms)) {
      this.algorithm.append(make("option", { value: name }, name));
    }
    const preferred = info.preferred_sampling_params;
    this.algorithm.value = preferred.dllm.algorithm;
    this.tokens = make("input", { type: "number", min: 1, max: info.context_length, value: maxTokens });
    this.temperature = make("input", { type: "number", min: 0, max: 100, step: 0.1 });
    this.temperature.placeholder = String(preferred.temperature ?? 0);
    this.seed = make("input", { type: "number", min: 0, placeholder: "random" });
    this.first = make("div", { className: "pair wide" });
    this.rest = make("div", { className: "pair" });
    this.more = make("details", { className: "more" }, make("summary", {}, "More options"), this.rest);
    this.node = make(
      "details",
      { open: isOpen },
      make("summary", {}, title),
      make(
        "div",
        { className: "pair" },
        field("Algorithm", this.algorithm, "field wide"),
        this.first,
        field("Most tokens", this.tokens),
        field("Temperature", this.temperature),
        field("Seed", this.seed),
        this.more,
      ),
    );
    this.algorithm.addEventListener("change", () => this.fill());
    this.fill();
  }

  fill() {
    const name = this.algorithm.value;
    const preferred = this.info.preferred_sampling_params.dllm;
    const own = preferred.algorithm === name ? preferred : {};
    const all = Object.entries(this.info.dllm.algorithms[name].options);
    this.options.clear();
    this.first.replaceChildren();
    this.rest.replaceChildren();
    for (const [option, facts] of all) {
      const control = this.control(facts, own[option] ?? facts.default);
      control.title = facts.help;
      this.options.set(option, { control, facts });
      const place = FIRST.includes(option) ? this.first : this.rest;
      place.append(field(option.replaceAll("_", " "), control));
    }
    this.more.hidden = this.rest.childElementCount === 0;
  }

  control(facts, value) {
    if (facts.type === "flag" || facts.type === "word") {
      const words = facts.type === "flag" ? ["true", "false"] : facts.words;
      const select = make("select", {}, make("option", { value: "" }, `default (${value})`));
      for (const word of words) select.append(make("option", { value: word }, word));
      return select;
    }
    const input = make("input", { type: "number", min: facts.low, max: facts.high });
    input.step = facts.type === "integer" ? 1 : "any";
    input.placeholder = value === null ? "not set" : String(value);
    return input;
  }

  // The request's fields. An empty control leaves the choice to the server.
  body() {
    const dllm = { algorithm: this.algorithm.value };
    for (const [name, { control, facts }] of this.options) {
      if (control.value === "") continue;
      if (facts.type === "word") dllm[name] = control.value;
      else if (facts.type === "flag") dllm[name] = control.value === "true";
      else dllm[name] = Number(control.value);
    }
    return {
      max_tokens: number(this.tokens),
      temperature: number(this.temperature),
      seed: number(this.seed),
      dllm: { ...dllm, stream_mode: "denoise" },
    };
  }

  name() {
    const given = [...this.options].filter(([, { control }]) => control.value !== "");
    return [this.algorithm.value, ...given.map(([name, { control }]) => `${name} ${control.value}`)].join(", ");
  }
}
