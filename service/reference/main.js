/** The reference: Swagger UI over openapi.json, with requests to where the page came from. */

const here = new URL(".", document.baseURI);

/** A paragraph of a description: `code` is code, all else is text. */
function paragraph(React, text, key) {
  const parts = text.split(/`([^`]*)`/);
  const shown = parts.map((part, i) => (i % 2 ? React.createElement("code", { key: i }, part) : part));
  return React.createElement("p", { key }, ...shown);
}

/** Descriptions as elements: Swagger UI's own way to show them writes markup from strings, which
 * the page's policy forbids. */
function descriptions({ React }) {
  function Markdown({ source }) {
    const paragraphs = (source || "").split(/\n\s*\n/).filter((text) => text.trim());
    const shown = paragraphs.map((text, i) => paragraph(React, text, i));
    return React.createElement("div", { className: "markdown" }, ...shown);
  }
  return { components: { Markdown } };
}

async function load() {
  const response = await fetch(new URL("openapi.json", here));
  if (!response.ok) throw new Error(`openapi.json: ${response.status}`);
  const spec = await response.json();
  // Behind a proxy the server does not know the path that it lies below.
  spec.servers = [{ url: here.pathname.replace(/\/$/, "") || "/" }];
  return spec;
}

function show(spec) {
  window.SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    validatorUrl: null,
    presets: [window.SwaggerUIBundle.presets.apis],
    plugins: [descriptions],
  });
}

load().then(show, (error) => {
  document.querySelector("#reference").textContent = `The reference cannot be loaded: ${error.message}`;
});
