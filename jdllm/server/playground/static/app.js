// Begins: waits for the server, asks for a key where one is set, and shows what the model can do.

import { get, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, make } from "./dom.js";
import { Images } from "./images.js";
import { Infill } from "./infill.js";

const RETRY_MS = 1500;
const THEMES = ["system", "light", "dark"];
const LEGENDS = { step: ["first step", "last step"], confidence: ["unsure", "sure"] };

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

function setColour(colour) {
  document.body.dataset.colour = colour;
  [$("legend-low").textContent, $("legend-high").textContent] = LEGENDS[colour];
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").hidden = text === "";
  $("status").classList.toggle("error", isError);
}

function showViews(views) {
  const tabs = views.map(([id, title]) => {
    const tab = make("button", { type: "button" }, title);
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", id);
    tab.addEventListener("click", () => select(id));
    return tab;
  });
  function select(chosen) {
    views.forEach(([id], i) => {
      $(id).hidden = id !== chosen;
      tabs[i].setAttribute("aria-selected", String(id === chosen));
    });
  }
  $("tabs").replaceChildren(...tabs);
  $("tabs").hidden = views.length < 2;
  select(views[0][0]);
}

async function open() {
  const { data } = await get("/v1/models");
  const info = await get("/model_info");
  const [card] = data;
  $("model").textContent = card.id;
  document.title = `${card.id} · jdllm`;
  $("key-form").hidden = true;
  say("");
  if (card.architecture.output_modalities.includes("image")) {
    new Images(info);
    showViews([["images", "Images"]]);
    return;
  }
  new Chat(info);
  if (info.dllm.rows !== "canvas") {
    showViews([["chat", "Chat"]]);
    return;
  }
  new Infill(info);
  showViews([["chat", "Chat"], ["infill", "Infilling"]]);
}

async function connect() {
  try {
    await open();
  } catch (error) {
    if (error.status === 401) {
      say("");
      $("key-form").hidden = false;
      $("key").focus();
      return;
    }
    say(error.status === 503 ? `${error.message}…` : `No connection: ${error.message}`, error.status !== 503);
    setTimeout(connect, RETRY_MS);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  connect();
});
$("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem("jdllm-theme") || "system") + 1) % 3];
  localStorage.setItem("jdllm-theme", theme);
  setTheme(theme);
});
for (const radio of document.getElementsByName("colour")) {
  radio.addEventListener("change", () => setColour(radio.value));
}
setTheme(localStorage.getItem("jdllm-theme") || "system");
setColour("step");
connect();
