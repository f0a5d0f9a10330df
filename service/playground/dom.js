/** Elements: found by id, made with text only. Nothing here or elsewhere parses markup, so that what
 * a model or a server says is always text. */

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with attributes (`true` is an empty one, `false` and null none) and children.
 * @param {string} tag @param {Object<string, any>} attributes @param {...(Node|string)} children
 */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `element`, of an SVG. */
export function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/** A button that calls `act` when it is pressed. */
export function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

export const NO_COPY = "The browser does not allow copying here: it requires HTTPS.";

/** Puts a text on the clipboard. Whether the browser allowed it. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    return false;
  }
  say("Copied.");
  return true;
}

let speaking = 0;

/** Tells users of screen readers something, once; what was being said is not interrupted. */
export function say(text) {
  const status = byId("status");
  status.textContent = "";
  clearTimeout(speaking);
  // A change is told, and the same text again would be none.
  speaking = setTimeout(() => { status.textContent = text; }, 50);
}

/** `work` at most once per frame, however often it is asked for; a tab in the background has no
 * frames, so that a timer stands in. */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    const run = () => { asked = false; work(); };
    if (document.hidden) setTimeout(run, 100);
    else requestAnimationFrame(run);
  };
}
