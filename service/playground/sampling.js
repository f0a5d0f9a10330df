/** The sampling parameters: their fields, and what of them a request has to say. */

import { element } from "./dom.js";

const SLIDERS = [
  { name: "temperature", label: "Temperature", value: 0.8, min: 0, max: 2, step: 0.05, off: 1, help: "0 is greedy" },
  { name: "top_p", label: "Top p", value: 1, min: 0.01, max: 1, step: 0.01, off: 1, help: "1 is off" },
  { name: "min_p", label: "Min p", value: 0, min: 0, max: 1, step: 0.01, off: 0, help: "0 is off" },
];
const NUMBERS = [
  { name: "top_k", label: "Top k", value: 0, min: 0, step: 1, off: 0, help: "0 is off" },
  { name: "max_tokens", label: "Max tokens", value: 400, min: 1, step: 1 },
  { name: "seed", label: "Seed", value: "", step: 1, help: "empty is random" },
];
const PENALTIES = [
  { name: "repetition_penalty", label: "Repetition", value: 1, min: 0.01, max: 100, step: 0.05, off: 1, help: "1 is off" },
  { name: "presence_penalty", label: "Presence", value: 0, min: -2, max: 2, step: 0.1, off: 0, help: "0 is off" },
  { name: "frequency_penalty", label: "Frequency", value: 0, min: -2, max: 2, step: 0.1, off: 0, help: "0 is off" },
];
const ALTERNATIVES = 5;

/** The fields, made in `host`. */
export class Sampling {
  constructor(host) {
    this._inputs = new Map();
    this._specs = [...SLIDERS, ...NUMBERS, ...PENALTIES];
    this.stop = element("textarea", {
      id: "stop-strings", rows: 2, spellcheck: "false", "aria-describedby": "stop-help",
    });
    this.marks = element("input", { id: "marks", type: "checkbox", checked: true });
    host.append(
      ...SLIDERS.map((spec) => this._field(spec, true)),
      element("div", { class: "three" }, ...NUMBERS.map((spec) => this._field(spec))),
      element("label", { class: "check" }, this.marks, "Colour tokens by probability"),
      element(
        "details", {}, element("summary", {}, "Stop strings and penalties"),
        element(
          "div", { class: "field" }, element("label", { for: "stop-strings" }, "Stop strings"),
          this.stop, element("small", { id: "stop-help" }, "one per line; \\n is a line break"),
        ),
        element("div", { class: "three" }, ...PENALTIES.map((spec) => this._field(spec))),
      ),
    );
    host.addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
  }

  /** What a request for text has to say. */
  read() {
    const said = {};
    for (const { name, off } of this._specs) {
      const { value, valueAsNumber, validity } = this._inputs.get(name);
      // What is no number is the server's to refuse.
      if (value === "" && !validity.badInput) continue;
      const number = Number.isNaN(valueAsNumber) ? value : valueAsNumber;
      if (number !== off) said[name] = number;
    }
    const stops = this.stop.value.split("\n").filter((line) => line !== "").map(unescaped);
    if (stops.length) said.stop = stops;
    if (this.marks.checked) said.logprobs = ALTERNATIVES;
    return said;
  }

  /** Marks the field that an error is about. */
  mark(param) {
    for (const input of [...this._inputs.values(), this.stop]) input.removeAttribute("aria-invalid");
    const name = (param ?? "").replace(/\[\d+\]/g, "");
    const wrong = name === "stop" ? this.stop : this._inputs.get(name);
    wrong?.setAttribute("aria-invalid", "true");
    const folded = wrong?.closest("details");
    if (folded) folded.open = true;
  }

  reset() {
    for (const { name, value } of this._specs) {
      const input = this._inputs.get(name);
      input.value = value;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
    this.stop.value = "";
    this.marks.checked = true;
    this.mark(null);
  }

  _field(spec, slides = false) {
    const { name, label, value, min, max, step, help } = spec;
    const id = `sampling-${name}`;
    // A value is made to fit the limits that there are when it is set: it comes last.
    const limits = { min, max, step: "any", value };
    const input = element("input", {
      id, ...limits, type: "number", inputmode: min < 0 || name === "seed" ? null : "decimal",
      "aria-describedby": help ? `${id}-help` : null,
    });
    this._inputs.set(name, input);
    const parts = [element("label", { for: id }, label)];
    if (slides) parts.push(slider(input, { min, max, step, value }, label));
    parts.push(input);
    if (help) parts.push(element("small", { id: `${id}-help` }, help));
    return element("div", { class: slides ? "field slides" : "field" }, ...parts);
  }
}

/** A slider that moves with a number's field. */
function slider(input, limits, label) {
  const made = element("input", { type: "range", ...limits, "aria-label": `${label}, as a slider` });
  made.addEventListener("input", () => {
    input.value = made.value;
    input.removeAttribute("aria-invalid");
  });
  input.addEventListener("input", () => { made.value = input.value; });
  return made;
}

const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

function unescaped(line) {
  return line.replace(/\\([nt\\])/g, (_, kind) => ESCAPES[kind]);
}
