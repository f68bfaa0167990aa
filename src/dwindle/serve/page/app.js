"use strict";
// The server explains each image once per budget and model (/v1/explain). The layer slider only redraws.

const $ = (id) => document.getElementById(id);
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37]];
const state = { image: null, name: "", models: [], explanations: new Map(), budget: null, token: "", latest: 0 };

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = VIRIDIS[Math.floor(at)], high = VIRIDIS[Math.ceil(at)], part = at % 1;
  return low.map((value, i) => Math.round(value + part * (high[i] - value)));
}

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (state.token) headers.Authorization = "Bearer " + state.token;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer; is it still running?");
  }
  if (answer.ok) return answer;
  $("sign").hidden = answer.status !== 401;
  const body = await answer.json().catch(() => ({}));
  throw new Error(body.error || "The server answered " + answer.status + ".");
}

function problem(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text || "";
}

function chosen() {
  return [...document.querySelectorAll("#models input:checked")].map((box) => box.value);
}

async function explain() {
  if (!state.image) return;
  const turn = ++state.latest;
  $("state").textContent = "Looking at " + state.name + " …";
  problem("");
  try {
    for (const name of chosen()) {
      const model = state.models.find((one) => one.name === name);
      const query = new URLSearchParams({ model: name });
      if (state.budget !== null && model.least_budget !== null) {
        query.set("budget", Math.max(state.budget, model.least_budget));
      }
      const answer = await ask("v1/explain?" + query, {
        method: "POST", body: state.image, headers: { "Content-Type": "application/octet-stream" },
      });
      const explanation = await answer.json();
      if (turn !== state.latest) return; // a newer request has been sent
      const photo = new Image();
      photo.src = explanation.seen;
      await photo.decode();
      state.explanations.set(name, { ...explanation, photo });
    }
    for (const name of state.explanations.keys()) if (!chosen().includes(name)) state.explanations.delete(name);
    draw();
    $("state").textContent = "Done: " + state.name + ".";
  } catch (error) {
    if (turn !== state.latest) return;
    problem(error.message);
    $("state").textContent = "";
  }
}

function paint(canvas, explanation, cells, cover) {
  const side = 448, rows = cells.length, columns = cells[0].length;
  canvas.width = canvas.height = side;
  const pen = canvas.getContext("2d");
  pen.drawImage(explanation.photo, 0, 0, side, side);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      pen.fillStyle = cover(cells[r][c]);
      const x = Math.round((c * side) / columns), y = Math.round((r * side) / rows);
      pen.fillRect(x, y, Math.round(((c + 1) * side) / columns) - x, Math.round(((r + 1) * side) / rows) - y);
    }
  }
}

function draw() {
  const layer = Number($("layer").value);
  const cards = chosen().filter((name) => state.explanations.has(name)).map((name) => {
    const explanation = state.explanations.get(name), card = $("card").content.firstElementChild.cloneNode(true);
    const find = (selector) => card.querySelector(selector);
    const heat = (depth) => depth === null ? "rgba(128,128,128,.75)" : "rgba(" + colour((depth - 1) / (explanation.blocks - 1)) + ",.62)";
    const alive = explanation.live[Math.max(layer, 1) - 1] || 0;
    card.dataset.model = name;
    find("h2").textContent = name;
    const caption = layer
      ? "layer " + layer + ": " + alive + " of " + explanation.tokens + " tokens alive"
      : "executed: mean depth " + explanation.depth.toFixed(1) + " of " + explanation.blocks;
    paint(find(".done"), explanation, explanation.depths, layer ? (depth) => depth >= layer ? "transparent" : "rgba(242,245,250,.86)" : heat);
    find(".done").setAttribute("aria-label", "The image under " + name + ", " + caption);
    find(".done-said").textContent = caption;
    if (explanation.plan) {
      const values = explanation.plan.flat().filter((value) => value !== null);
      const mean = values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);
      paint(find(".plan"), explanation, explanation.plan, heat);
      const grey = values.length < explanation.plan.flat().length ? "; grey: halted before a plan" : "";
      find(".plan-said").textContent = "planned: mean depth " + mean.toFixed(1) + grey;
      find(".plan").setAttribute("aria-label", "The depth " + name + " planned for each patch, mean " + mean.toFixed(1));
    } else {
      find(".planned").remove();
      find(".pictures").classList.add("single");
    }
    find(".gmacs").textContent = explanation.gmacs.toFixed(2) + " of " + explanation.gmacs_static.toFixed(2) + " static (" + Math.round(100 * explanation.cost) + "%)";
    find(".ms").textContent = explanation.ms.toFixed(0) + " against " + explanation.static_ms.toFixed(0) + " static";
    find(".gmacs-bar").style.width = Math.min(100, 100 * explanation.cost) + "%";
    find(".ms-bar").style.width = Math.min(100, (100 * explanation.ms) / explanation.static_ms) + "%";
    for (const one of explanation.top) {
      const line = document.createElement("li"), text = document.createElement("span"), bar = document.createElement("div");
      const label = document.createElement("b"), share = document.createElement("span"), fill = document.createElement("i");
      label.textContent = one.label;
      share.textContent = (100 * one.confidence).toFixed(1) + "%";
      fill.style.width = 100 * one.confidence + "%";
      bar.className = "bar";
      text.append(label, share);
      bar.append(fill);
      line.append(text, bar);
      find(".top").append(line);
    }
    return card;
  });
  $("cards").replaceChildren(...cards);
  $("legend").hidden = !cards.length;
  $("layer").disabled = $("budget").disabled = !cards.length;
  $("layer-said").textContent = layer ? String(layer) : "all";
}

function take(blob, name) {
  state.image = blob;
  state.name = name;
  for (const button of document.querySelectorAll("#samples button")) {
    button.setAttribute("aria-pressed", String(button.dataset.name === name));
  }
  explain();
}

function begin(models) {
  state.models = models;
  const first = models[0], budget = $("budget");
  if (first.least_budget !== null) {
    budget.min = Math.ceil(100 * first.least_budget) / 100;
    budget.value = first.budget;
  }
  $("layer").max = first.blocks;
  $("models").replaceChildren($("models").querySelector("legend"), ...models.map((model, i) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.value = model.name;
    box.checked = i === 0;
    box.addEventListener("change", explain);
    label.append(box, " " + model.name + (model.name === model.method ? "" : " (" + model.method + ")"));
    return label;
  }));
}

async function start() {
  try {
    begin((await (await ask("v1/models")).json()).models);
    problem("");
    const names = (await (await ask("v1/samples")).json()).samples;
    $("samples").replaceChildren(...names.map((name) => {
      const button = document.createElement("button"), picture = document.createElement("img");
      button.type = "button";
      button.dataset.name = name;
      button.setAttribute("aria-pressed", "false");
      picture.src = "samples/" + name + ".jpg";
      picture.alt = "Sample photograph: " + name;
      button.append(picture);
      button.addEventListener("click", async () => {
        try {
          take(await (await ask("samples/" + name + ".jpg")).blob(), name);
        } catch (error) {
          problem(error.message);
        }
      });
      return button;
    }));
  } catch (error) {
    problem(error.message);
  }
}

let timer = 0;
$("budget").addEventListener("input", () => {
  state.budget = Number($("budget").value);
  $("budget-said").textContent = Math.round(100 * state.budget) + "%";
  clearTimeout(timer);
  timer = setTimeout(explain, 150);
});
$("layer").addEventListener("input", draw);
$("file").addEventListener("change", () => $("file").files[0] && take($("file").files[0], $("file").files[0].name));
$("sign").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value;
  $("sign").hidden = true;
  start();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0], event.dataTransfer.files[0].name);
  });
}
const scale = $("scale").getContext("2d");
for (let x = 0; x < 240; x++) {
  scale.fillStyle = "rgb(" + colour(x / 239) + ")";
  scale.fillRect(x, 0, 1, 12);
}
start();
