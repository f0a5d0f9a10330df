/** The page: its parts are made here and know of each other through here. */

import { byId, element } from "./dom.js";
import { compact } from "./format.js";
import { Forking } from "./forking.js";
import { Inspector } from "./inspector.js";
import { KeyDialog } from "./key.js";
import { Load } from "./load.js";
import { Reading } from "./reading.js";
import { Sampling } from "./sampling.js";
import { Scoring } from "./scoring.js";
import { Server } from "./server.js";
import { Starts } from "./starts.js";
import { States } from "./states.js";
import { tabs } from "./tabs.js";
import { Tree } from "./tree.js";
import { Writing } from "./writing.js";

const PATIENCE = 2; // seconds until the next try where the server names none

const server = new Server((error) => keys.open(error.message));
const keys = new KeyDialog(server, () => { begin(); load.watch(); });
const load = new Load(server);
const sampling = new Sampling(byId("sampling"));
const states = new States(server);
const tree = new Tree(states, (state) => {
  for (const each of Object.values(panels)) each.moveTo(state);
  starts.render();
  showLegend();
}, goOn);
const model = () => byId("model").value || undefined;
const parts = {
  server, states, tree, sampling, model, onTokens: showLegend, onModelGone: begin,
  onAskOn: async (id) => { await tree.load(); if (states.get(id)) tree.choose(id); goOn(); },
};
const panels = {
  write: new Writing(parts), fork: new Forking(parts), read: new Reading(parts),
  score: new Scoring(parts),
};
const starts = new Starts(parts);
const inspector = new Inspector(byId("token-card"));
for (const text of Object.values(panels).flatMap(({ texts }) => texts)) inspector.attach(text);
let panel = "write";
let again = 0;

const choosePanel = tabs(document.querySelector("[role=tablist]"), (chosen) => {
  panel = chosen;
  inspector.hide();
  showLegend();
});

/** A text is gone on with where it can be. */
function goOn() {
  if (panel !== "score") choosePanel("write");
  panels[panel].field.focus();
}

function showLegend() {
  byId("legend").hidden = panels[panel].texts.every(({ units }) => units.length === 0);
}

/** Hides what a server that keeps no states does not do. */
function offer(card) {
  const none = card.max_states === 0;
  byId("no-states").hidden = !none;
  for (const id of ["tree", "states-again", "tab-fork", "tab-read"]) byId(id).hidden = none;
  document.body.classList.toggle("stateless", none);
  if (none && (panel === "fork" || panel === "read")) choosePanel("write");
  states.offer(none ? [] : card.starts);
}

/** Fills in the models, once there are any. */
async function begin() {
  clearTimeout(again);
  const about = byId("about");
  try {
    const { data } = await server.json("v1/models");
    const picker = byId("model");
    picker.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    picker.disabled = false;
    const describe = () => {
      const card = data.find(({ id }) => id === picker.value);
      const kind = { mingru: "minGRU", minlstm: "minLSTM", hgrn: "HGRN", mamba: "Mamba", mamba2: "Mamba-2" }[card.cell] ?? card.cell;
      const numbers = card.quantization ?? card.dtype;
      about.textContent = `${kind}, ${compact(card.parameters)} weights in ${numbers}, on ${card.device}`;
      offer(card);
    };
    picker.onchange = describe;
    describe();
    await tree.load();
  } catch (error) {
    about.textContent = error.message;
    // It loads, or is being started again; a key is waited for.
    const wait = error.retryAfter ?? PATIENCE;
    if (error.status !== 401) again = setTimeout(begin, wait * 1000);
  }
}

byId("sampling-reset").addEventListener("click", () => sampling.reset());

document.addEventListener("keydown", (event) => {
  if (byId("key-dialog").open || event.isComposing) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (event.repeat) return;
    panels[panel].run();
  } else if (event.key === "Escape") {
    inspector.hide();
    panels[panel].stop();
  }
});

begin();
load.watch();
