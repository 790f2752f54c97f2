// Small helpers. Text only ever becomes text nodes, so nothing a model writes is markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  const { data, ...own } = properties;
  Object.assign(node, own);
  Object.assign(node.dataset, data);
  node.append(...children);
  return node;
}

export function field(label, control, className = "field") {
  return make("label", { className }, label, control);
}

// The number in an input, or undefined for an empty one.
export function number(input) {
  return input.value.trim() === "" ? undefined : Number(input.value);
}

export function chips(container, texts, choose) {
  for (const text of texts) {
    const chip = make("button", { type: "button" }, text);
    chip.addEventListener("click", () => choose(text));
    container.append(chip);
  }
}

export function isAbort(error) {
  return error.name === "AbortError";
}
