/** Tabs: one panel of several, chosen with a press or the arrow keys. */

import { byId } from "./dom.js";

/** Returns a function that chooses a panel by its id.
 * @param {HTMLElement} list the tablist @param {(panel: string) => void} onChange
 * @returns {(panel: string) => void} */
export function tabs(list, onChange) {
  const all = [...list.querySelectorAll("[role=tab]")];
  const select = (chosen) => {
    for (const tab of all) {
      const here = tab === chosen;
      tab.setAttribute("aria-selected", String(here));
      tab.tabIndex = here ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !here;
    }
    onChange(chosen.getAttribute("aria-controls"));
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) select(tab);
  });
  list.addEventListener("keydown", (event) => {
    const shown = all.filter((tab) => !tab.hidden);
    const at = shown.indexOf(document.activeElement);
    const to = {
      ArrowRight: (at + 1) % shown.length, ArrowLeft: (at - 1 + shown.length) % shown.length,
      Home: 0, End: shown.length - 1,
    }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    select(shown[to]);
    shown[to].focus();
  });
  return (panel) => select(all.find((tab) => tab.getAttribute("aria-controls") === panel));
}
