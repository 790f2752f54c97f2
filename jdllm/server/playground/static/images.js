// Images: a prompt, previews while the pictures are denoised, and two numbers of steps side by side.

import { stream } from "./api.js";
import { $, chips, isAbort, make, number } from "./dom.js";

const EXAMPLES = [
  "a red circle left of a blue square on a white ground",
  "a green triangle above a yellow circle",
  "a blue square on a gray ground",
];
const SMALL = 200; // pictures of fewer pixels a side are shown with their pixels

// A picture of base64 as an address that this page may show and save.
function address(base64, format) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: `image/${format}` }));
}

class Picture {
  constructor(width, height) {
    this.image = make("img", { alt: "", hidden: true });
    this.image.classList.toggle("small", Math.max(width, height) < SMALL);
    const frame = make("div", { className: "frame" }, this.image);
    frame.style.setProperty("--ratio", `${width} / ${height}`);
    this.caption = make("figcaption", {}, "waiting");
    this.node = make("figure", { className: "waiting" }, frame, this.caption);
  }

  show(event, prompt) {
    const before = this.image.src;
    this.image.src = address(event.b64_json, event.output_format);
    this.image.hidden = false;
    if (before) URL.revokeObjectURL(before);
    if (event.type === "image_generation.partial_image") {
      this.caption.textContent = `preview ${event.partial_image_index + 1}`;
      return;
    }
    this.node.classList.remove("waiting");
    this.image.alt = prompt;
    const { denoise_s: denoise, decode_s: decode } = event.timings;
    const save = make("a", { href: this.image.src }, "Save");
    save.download = `jdllm-${event.seed}.${event.output_format}`;
    this.caption.replaceChildren(
      make("span", {}, `seed ${event.seed}`),
      make("span", {}, `${event.num_inference_steps} steps`),
      make("span", {}, `${(denoise + decode).toFixed(2)} s`),
      save,
    );
  }

  fail(message) {
    if (!this.node.classList.contains("waiting")) return;
    this.node.classList.remove("waiting");
    this.caption.textContent = message;
    this.caption.classList.add("problem");
  }
}

export class Images {
  constructor(info) {
    const preferred = info.preferred_sampling_params;
    // Pipelines differ in which kind of guidance they have.
    this.guidance = preferred.guidance_scale === null ? "true_cfg_scale" : "guidance_scale";
    $("size").value = `${preferred.width}x${preferred.height}`;
    $("steps").placeholder = preferred.num_inference_steps;
    $("guidance").placeholder = preferred[this.guidance] ?? 0;
    $("other-steps").value = Math.max(1, Math.round(preferred.num_inference_steps / 4));
    this.isRunning = null;
    $("compare-steps").addEventListener("change", () => {
      $("other-steps-field").hidden = !$("compare-steps").checked;
    });
    $("paint-stop").addEventListener("click", () => this.isRunning?.abort());
    $("paint").addEventListener("submit", (event) => {
      event.preventDefault();
      this.paint();
    });
    chips($("image-examples"), EXAMPLES, (text) => {
      $("prompt").value = text;
      this.paint();
    });
  }

  body(prompt) {
    return {
      prompt,
      size: $("size").value.replaceAll(" ", "").replace("×", "x"),
      n: number($("count")),
      num_inference_steps: number($("steps")),
      [this.guidance]: number($("guidance")),
      seed: number($("image-seed")),
      partial_images: number($("previews")),
    };
  }

  async paint() {
    const prompt = $("prompt").value.trim();
    if (!prompt || this.isRunning) return;
    $("images-empty").hidden = true;
    const body = this.body(prompt);
    const bodies = [body];
    if ($("compare-steps").checked) {
      // Only with one seed do two numbers of steps show the same picture.
      body.seed ??= Math.floor(Math.random() * 2 ** 31);
      bodies.push({ ...body, num_inference_steps: number($("other-steps")) });
    }
    const columns = make("div", { className: bodies.length > 1 ? "columns" : "" });
    $("gallery").prepend(make("section", { className: "batch" }, make("p", {}, prompt), columns));
    const run = (this.isRunning = new AbortController());
    this.buttons();
    await Promise.all(bodies.map((one) => this.column(columns, one, bodies.length > 1, run.signal)));
    this.isRunning = null;
    this.buttons();
  }

  async column(parent, body, hasTitle, signal) {
    const [width, height] = body.size.split("x").map(Number);
    const pictures = Array.from({ length: body.n || 1 }, () => new Picture(width || 1, height || 1));
    const grid = make("div", { className: "grid" }, ...pictures.map((one) => one.node));
    const steps = body.num_inference_steps ?? $("steps").placeholder;
    const title = hasTitle ? [make("p", { className: "quiet" }, `${steps} steps`)] : [];
    parent.append(make("div", { className: "column" }, ...title, grid));
    try {
      for await (const event of stream("/v1/images/generations", body, signal)) {
        pictures[event.image_index].show(event, body.prompt);
      }
    } catch (error) {
      const message = isAbort(error) ? "stopped" : error.message;
      for (const one of pictures) one.fail(message);
    }
  }

  buttons() {
    $("paint-go").hidden = this.isRunning !== null;
    $("paint-stop").hidden = this.isRunning === null;
  }
}
