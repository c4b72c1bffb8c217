/* Search from a folder. Browsers refuse to start a Worker for a page that was opened as file://. This one runs the
   worker's script in a hidden frame instead, where it finds the same names: `postMessage`, messages, `importScripts`.
   It takes the place of the script that mkdocs-material's offline plugin would load from the network (mkdocs.yml). */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      const address = new URL(url, document.baseURI);
      this.#frame.hidden = true;
      this.#frame.srcdoc = "<!doctype html>";
      this.#ready = new Promise((resolve) => this.#frame.addEventListener("load", resolve, { once: true })).then(() => {
        const inside = this.#frame.contentWindow; // not before: the document that a frame begins with is replaced
        const load = (source) =>
          new Promise((resolve, reject) => {
            const script = inside.document.createElement("script");
            script.src = new URL(source, address);
            script.onload = resolve;
            script.onerror = () => reject(new Error(`${source} could not be loaded`));
            inside.document.head.appendChild(script);
          });
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = async (...sources) => {
          for (const source of sources) await load(source);
        };
        return load(address);
      });
      this.#ready.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error, message: error.message })));
      document.body.appendChild(this.#frame);
    }

    postMessage(data) {
      this.#ready.then(
        () => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
        () => {}, // told above
      );
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
