/** The page: its parts are made here and know of each other through here. */

import { byId, element } from "./dom.js";
import { compact } from "./format.js";
import { Inspector } from "./inspector.js";
import { KeyDialog } from "./key.js";
import { Load } from "./load.js";
import { Sampling } from "./sampling.js";
import { Scoring } from "./scoring.js";
import { Server } from "./server.js";
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
  writing.moveTo(state);
  scoring.moveTo(state);
  showLegend();
}, () => (panel === "write" ? writing.prompt : scoring.own).focus());
const model = () => byId("model").value || undefined;
const parts = { server, states, tree, sampling, model, onTokens: showLegend, onModelGone: begin };
const writing = new Writing(parts);
const scoring = new Scoring(parts);
const inspector = new Inspector(byId("token-card"));
inspector.attach(writing.answer);
inspector.attach(scoring.text);
let panel = "write";
let again = 0;

function showLegend() {
  const shown = panel === "write" ? writing.answer : scoring.text;
  byId("legend").hidden = shown.units.length === 0;
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
      const kind = { mingru: "minGRU", minlstm: "minLSTM", hgrn: "HGRN" }[card.cell] ?? card.cell;
      const numbers = card.quantization ?? card.dtype;
      about.textContent = `${kind}, ${compact(card.parameters)} weights in ${numbers}, on ${card.device}`;
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

tabs(document.querySelector("[role=tablist]"), (chosen) => {
  panel = chosen;
  inspector.hide();
  showLegend();
});
byId("sampling-reset").addEventListener("click", () => sampling.reset());

document.addEventListener("keydown", (event) => {
  if (byId("key-dialog").open || event.isComposing) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (event.repeat) return;
    if (panel === "write") writing.generate();
    else scoring.score();
  } else if (event.key === "Escape") {
    inspector.hide();
    if (panel === "write") writing.stop();
    else scoring.stop();
  }
});

begin();
load.watch();
